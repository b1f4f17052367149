"""What a device sent and was ordered in one generation, kept so that a lost stage can be rebuilt.

It keeps the tensors themselves, as they were sent: no copy is made, they only live longer. Entries
older than the last stable snapshot are dropped, and the oldest ones that exceed the memory. So are
orders where no device keeps snapshots, or nothing is sent: then there is no version to start from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from p2ptrain.errors import PeerError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import MicroBatchSlice, Value
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.rebuild_plan import MIN_LIMIT_BYTES

MAX_STEPS = 1 << 14
"""Orders take memory too, 400 bytes each. Copies come at least once in 60 s of training."""

Sent: TypeAlias = tuple[MicroBatchSlice, Sequence[Value]]
"""A piece and its values, as they were put on the way."""


@dataclass(slots=True)
class _LoggedStep:
    """One update.

    Attributes:
        coefficient: what clipping multiplied the gradients with.
        sent: by receiving stage and flow.
    """

    order: RoundOrder
    coefficient: Coefficient | None = None
    sent: dict[tuple[int, str], list[Sent]] = field(default_factory=dict)
    nbytes: int = 0


class ReplayLog:
    """See the module. For the event loop alone.

    Attributes:
        since: the first step of which everything is here.
    """

    def __init__(self, start: int, limit_bytes: int = MIN_LIMIT_BYTES) -> None:
        """A generation begins with version `start`."""
        self.since = start
        self._limit_bytes = limit_bytes
        self._steps: dict[int, _LoggedStep] = {}  # ascending
        self._bytes = 0

    # -- what happens ----------------------------------------------------------------------------

    def note_order(self, order: RoundOrder) -> None:
        """A round is ordered."""
        if order.round.mode is RoundMode.TRAIN and order.round.step >= self.since:
            self._steps[order.round.step] = _LoggedStep(order)
            if len(self._steps) > MAX_STEPS:
                self._forget(next(iter(self._steps)))

    def counts(self, step: int, coefficient: Coefficient | None) -> None:
        """The update of that round counts."""
        if step in self._steps:
            self._steps[step].coefficient = coefficient

    def sent(
        self,
        order: RoundOrder,
        stage: int,
        flow: str,
        piece: MicroBatchSlice,
        values: Sequence[Value],
    ) -> None:
        """A piece of a training round is on its way to `stage`."""
        step = self._steps.get(order.round.step)
        if step is None or order.round.mode is not RoundMode.TRAIN:
            return
        nbytes = sum(value.untyped_storage().nbytes() for value in values if value is not None)
        step.sent.setdefault((stage, flow), []).append((piece, values))
        step.nbytes += nbytes
        self._bytes += nbytes
        while self._bytes > self._limit_bytes and self._steps:
            self._forget(next(iter(self._steps)))

    def forget_before(self, step: int) -> None:
        """There is a newer version to go back to."""
        for old in [one for one in self._steps if one < step]:
            self._forget(old)
        self.since = max(self.since, step)

    # -- what it is for --------------------------------------------------------------------------

    def orders(self, first: int, end: int) -> list[tuple[RoundOrder, Coefficient | None]]:
        """Of the steps [first, end). Raises PeerError: some are not here."""
        steps = [self._step(step) for step in range(first, end)]
        return [(step.order, step.coefficient) for step in steps]

    def pieces(self, step: int, stage: int, flow: str) -> Iterable[Sent]:
        """What was sent to a stage in that step. Raises PeerError: it is not here."""
        return tuple(self._step(step).sent.get((stage, flow), ()))

    def _step(self, number: int) -> _LoggedStep:
        step = self._steps.get(number)
        if step is None or number < self.since:
            raise PeerError(f"what happened in step {number + 1} is not kept any more")
        return step

    def _forget(self, number: int) -> None:
        self._bytes -= self._steps.pop(number).nbytes
        self.since = max(self.since, number + 1)
