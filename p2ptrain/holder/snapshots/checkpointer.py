"""When a running job is checkpointed, and how its state is collected on the holder.

The stages take snapshots right after the update and training continues; the snapshots travel at
bulk priority. They are read by version, which never changes: either one consistent state is
written, whatever happens to the generation meanwhile, or nothing. One checkpoint is written at a
time. If snapshots for the last one were missing, it is written after the last update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeAlias

from torch import Tensor

from p2ptrain.aio.tasks import to_the_end
from p2ptrain.errors import OptionError, PeerError, TrainingError
from p2ptrain.logs import get_logger
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.recovery.version import Version
from p2ptrain.state.checkpoint_files import (
    Checkpoint,
    CheckpointProgress,
    WrittenCheckpoint,
    rewrite_index,
    save,
)

log = get_logger(__name__)

Gather: TypeAlias = Callable[[Version], Awaitable[Mapping[str, Tensor]]]
"""A version -> all of it, by `model:` and `optimizer:` names."""

MIN_INTERVAL_SECONDS = 30.0

COST_SHARE = 0.05


class CheckpointSchedule:
    """Decides which updates are followed by a checkpoint. Pure: time is an argument.

    Args:
        every: updates between two checkpoints, or None for one whenever at least
            MIN_INTERVAL_SECONDS have passed and the last one's time would be at most COST_SHARE.
    """

    def __init__(self, every: int | None, now: float) -> None:
        self._every = every
        self._last = now
        self._cost_seconds = 0.0

    @property
    def asked_for(self) -> bool:
        """The person said when: training rather waits than leaves one out."""
        return self._every is not None

    def wants(self, step: int, *, ends_epoch: bool, now: float) -> bool:
        """Whether to take one after update `step`."""
        if self._every is not None:
            return ends_epoch or step % self._every == 0
        interval = max(MIN_INTERVAL_SECONDS, self._cost_seconds / COST_SHARE)
        return ends_epoch or now - self._last >= interval

    def taken(self, seconds: float, now: float) -> None:
        """One was written, which took `seconds`."""
        self._last = now
        self._cost_seconds = seconds


class Checkpointer:
    """Takes the checkpoints of one run. Create it in a running event loop; `close` it.

    A checkpoint that cannot be written does not stop the training: `failure` describes the last
    one, or is None once a later one succeeded. The user sees it once, and once it works again. One
    whose state is not to be had any more, because a device has gone, is left out: training goes
    back to before it, or the next one comes soon. After the last update none comes: `make_sure`
    takes that one, `conclude` reports where there is none.

    Attributes:
        folder: where they are written.
        failure: see above.
        reading: the version of which copies are still needed.
    """

    def __init__(
        self,
        folder: Path,
        cadence: CheckpointSchedule,
        gather: Gather,
        progress: Callable[[int], CheckpointProgress],
        warn: Callable[[str], None],
        on_written: Callable[[Version, WrittenCheckpoint], None],
    ) -> None:
        """`on_written`: called with every version that is on the disk whole, and its place."""
        self.folder = folder
        self._on_written = on_written
        self._cadence = cadence
        self._gather = gather
        self._progress = progress
        self._warn = warn
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._written = -1  # newest step
        self._notified = -1  # newest step reported as not written
        self._why_left_out = "it was never begun"
        self._why_failed: str | None = None  # as reported; None: all is well
        self._due: int | None = None  # what was wanted and is not taken yet
        self.failure: TrainingError | None = None
        self.reading: Version | None = None

    def begin(self) -> None:
        """A generation begins: what the one before wanted and had not begun will not come."""
        self._due = None
        if self._task is None or self._task.done():
            self._idle.set()

    async def wants(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether update `step` needs a copy; waits until the checkpoint before is written."""
        wanted = self._cadence.wants(step, ends_epoch=ends_epoch, now=monotonic())
        must = ends_epoch or self._cadence.asked_for
        if not wanted or step <= self._written or (not must and not self._idle.is_set()):
            return False
        await self._idle.wait()
        self._idle.clear()
        self._due = step
        return True

    @property
    def due(self) -> int | None:
        """The update after which one will be taken that was wanted and is not taken yet."""
        return self._due

    def is_due(self, step: int) -> bool:
        """Whether `wants` said so of the update that now counts."""
        return step == self._due

    def take(self, version: Version) -> None:
        """Gather and write a version of which the stages keep copies, in a task of its own."""
        self._begin_to_take(version, self._gather)

    def evaluated(self, step: int) -> None:
        """The evaluation after `step` updates is reported: its checkpoint records that.

        If a later one is under way already, that records it; killed before, it is reported twice.
        """
        if step == self._written and self._idle.is_set():
            self._idle.clear()
            self._task = asyncio.create_task(self._rewrite_index(step), name=f"evaluated {step}")

    async def make_sure(self, version: Version, gather: Gather) -> None:
        """Have the last version written: all updates are made, and what stages are stays.

        Args:
            gather: reads the stages themselves; there may be no snapshots.
        """
        await self.idle()
        if max(self._written, self._notified) < version.step:
            self._begin_to_take(version, gather)
            await self.idle()

    def conclude(self, step: int) -> None:
        """The job has ended with `step` updates: reports if no checkpoint has them."""
        if max(self._written, self._notified) < step:
            why = f"no checkpoint of step {step}, the last one: {self._why_left_out}"
            failure = TrainingError(f"{why}. The trained weights are here")
            self._fail(step, failure, str(failure))

    async def idle(self) -> None:
        """Wait until nothing is under way. Raises what is no checkpoint's failure but a bug."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Read no more; what is being written is written to its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _begin_to_take(self, version: Version, gather: Gather) -> None:
        self._due, self.reading = None, version
        taking = self._take(version, gather)
        self._task = asyncio.create_task(taking, name=f"checkpoint {version.step}")

    async def _take(self, version: Version, gather: Gather) -> None:
        started = monotonic()
        try:
            state = await gather(version)
            self.reading = None
            checkpoint = Checkpoint(self._progress(version.step), *split_state(state))
            written = await to_the_end(partial(save, self.folder, checkpoint))
            self._written, self.failure = version.step, None
            self._on_written(version, written)
            self._report_working(version.step)
            if self._progress(version.step) != checkpoint.progress:  # evaluated meanwhile
                await self._rewrite_index(version.step)
        except (PeerError, TimeoutError) as error:
            self._why_left_out = str(error) or "too slow"
            log.warning("checkpoint_left_out", step=version.step, why=self._why_left_out)
        except TrainingError as error:
            self._fail(version.step, error, str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = "this device has too little memory for the whole model"
            failure = TrainingError(f"no checkpoint of step {version.step}: {why}")
            self._fail(version.step, failure, why)
        finally:
            now = monotonic()
            self._cadence.taken(now - started, now)
            self.reading = None
            self._idle.set()

    async def _rewrite_index(self, step: int) -> None:
        try:
            progress = self._progress(step)
            await to_the_end(partial(rewrite_index, self.folder, progress))
        except (OptionError, TrainingError) as error:
            log.warning("evaluation_not_noted", step=step, why=str(error))
        finally:
            self._idle.set()

    def _fail(self, step: int, failure: TrainingError, why: str) -> None:
        """`why` names no step: a repeated reason is only logged."""
        self.failure, self._notified = failure, step
        if why == self._why_failed:
            log.warning("checkpoint_failed_again", step=step, why=why)
            return
        self._why_failed = why
        self._warn(str(failure))

    def _report_working(self, step: int) -> None:
        if self._why_failed is not None:
            self._why_failed = None
            self._warn(f"checkpoints can be written again: that of step {step} is in {self.folder}")


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(model tensors, optimizer tensors) without their prefixes."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, tensor in state.items():
        kind, _, rest = name.partition(":")
        parts[kind][rest] = tensor
    return parts["model"], parts["optimizer"]
