"""What later batches show that those looked at before the plan did not."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.loader import FeedItem
from p2ptrain.holder.start.loss_count import LEAVES_OUT
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.model.sample_independence.class_losses import DEFAULT_IGNORED, entered
from p2ptrain.plan.types.allocation import Allocation


class LateBatches:
    """Warns, once of each, that parts of a mini-batch train something else than the whole.

    Args:
        last: the stage that computes the loss.
        warn: shows a sentence to the user.
    """

    def __init__(
        self, prepared: PreparedJob, last: StageAssignment, warn: Callable[[str], None]
    ) -> None:
        self._prepared = prepared
        self._warn = warn
        self._divides = last.shared and last.allocation is Allocation.SAMPLES
        self._has_named_torn = False
        known = (*prepared.sharing.effects, *prepared.changes)
        is_known = any(LEAVES_OUT in words for words in known)
        self._unweighed = None if is_known else prepared.unweighed

    def check_whole(self, shape: Round) -> None:
        """Of batches that a loader makes larger than those that were looked at.

        Raises:
            ScriptError: the loss is a sum, whose parts would be weighed as of a mean.
        """
        torn, sums = self._prepared.why_torn(shape), self._prepared.across.sum_of
        if not torn or (self._has_named_torn and not sums):
            return
        self._has_named_torn = True
        if sums:
            raise ScriptError(torn)
        self._warn(f"{torn}; it is computed in parts, which trains something else")

    def check_ignored(self, feed: FeedItem) -> None:
        """Of targets left out that were not among the samples seen before the plan."""
        if self._unweighed is None or feed.piece.mode is not RoundMode.TRAIN:
            return
        batch_size = self._prepared.job.batch_size
        if not self._divides and feed.piece.size >= batch_size:
            return
        leaves = entered(self._prepared.captured.description, feed.inputs, feed.targets)
        if self._unweighed.leave_out(leaves):
            self._unweighed = None
            self._warn(
                f"targets of {DEFAULT_IGNORED}, which the loss leaves out, came up after the "
                "plan was made: mini-batches are computed in parts, and each part leaves out its "
                f"own, which trains something else than the whole. Set micro_batch={batch_size}"
                f"{' and use --planner pp, which divides none' if self._divides else ''}"
            )
