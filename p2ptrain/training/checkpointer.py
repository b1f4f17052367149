"""When a running job is checkpointed, and how its state comes together on the holder.

The stages keep a copy of their state right after the update (one clone), training goes on, and the
copies travel at bulk priority. One checkpoint is under way at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import TrainingError
from p2ptrain.training.checkpoint import Checkpoint, Progress, save

Gather: TypeAlias = Callable[[int], Awaitable[Mapping[str, Tensor]]]
"""Step -> the whole state after it, by `model:` and `optimizer:` names."""

LEAST_INTERVAL_SECONDS = 30.0
COST_SHARE = 0.05


class Cadence:
    """Decides which updates are followed by a checkpoint. Pure: time is an argument.

    Args:
        every: updates between two checkpoints, or None for one whenever at least
            LEAST_INTERVAL_SECONDS have passed and the last one's time would be at most COST_SHARE.
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
        interval = max(LEAST_INTERVAL_SECONDS, self._cost_seconds / COST_SHARE)
        return ends_epoch or now - self._last >= interval

    def taken(self, seconds: float, now: float) -> None:
        """One was written, which took `seconds`."""
        self._last = now
        self._cost_seconds = seconds


class Checkpointer:
    """Takes the checkpoints of one run.

    A checkpoint that cannot be written does not stop the training: `failure` tells of the last one,
    or is None once a later one succeeded.
    """

    def __init__(
        self,
        folder: Path,
        cadence: Cadence,
        gather: Gather,
        progress: Callable[[int], Progress],
        warn: Callable[[TrainingError], None],
    ) -> None:
        self._folder = folder
        self._cadence = cadence
        self._gather = gather
        self._progress = progress
        self._warn = warn
        self._idle = asyncio.Event()
        self._idle.set()
        self.failure: TrainingError | None = None

    async def wants(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether update `step` needs a snapshot; waits until the one before is written."""
        wanted = self._cadence.wants(step, ends_epoch=ends_epoch, now=monotonic())
        must = ends_epoch or self._cadence.asked_for
        if not wanted or (not must and not self._idle.is_set()):
            return False
        await self._idle.wait()
        self._idle.clear()
        return True

    async def take(self, step: int) -> None:
        """Gather and write the snapshot of update `step`."""
        started = monotonic()
        try:
            state = await self._gather(step)
            checkpoint = Checkpoint(self._progress(step), *split_state(state))
            await asyncio.to_thread(save, self._folder, checkpoint)
            self.failure = None
        except TrainingError as error:
            self.failure = error
            self._warn(error)
        finally:
            now = monotonic()
            self._cadence.taken(now - started, now)
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(model tensors, optimizer tensors) without their prefixes."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, tensor in state.items():
        kind, _, rest = name.partition(":")
        parts[kind][rest] = tensor
    return parts["model"], parts["optimizer"]
