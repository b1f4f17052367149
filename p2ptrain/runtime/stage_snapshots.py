"""Snapshots of a stage, made on its own device right after an update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from p2ptrain.process.host_process import HeapCreep, beside_the_heap
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.recovery.state_report import StateKind
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.live_stage import TrainedStage
from p2ptrain.state.snapshot_store import Named, SnapshotStore

T = TypeVar("T")

OnKept: TypeAlias = Callable[[int, Version, str | None], None]
"""(stage, version, why there is no copy of it; None where there is one)."""


class RunInCompute(Protocol):
    """Runs a function in the compute thread."""

    async def __call__(self, function: Callable[[], T]) -> T:
        """Returns or raises what it does."""


class StageSnapshots:
    """The copies of one stage in one generation.

    Attributes:
        on_kept: called with every snapshot that was asked for, on the event loop, once it is there.
    """

    def __init__(
        self,
        live: TrainedStage,
        run: RunInCompute,
        store: SnapshotStore,
        *,
        device: str,
        stage: int,
        keeps: bool,
    ) -> None:
        """Copy `live`.

        Args:
            store: where copies go.
            device: this one.
            stage: its number, for `on_kept`.
            keeps: whether this device copies when a round's order says so.
        """
        self.on_kept: OnKept = _ignore_outcome
        self._tensors = live
        self._run = run
        self._store = store
        self._device = device
        self._stage = stage
        self._keeps = keeps
        self._creep = HeapCreep()

    async def copy(self) -> None:
        """Keep a copy of the stage as it is, before its first round."""
        slot = self._slot()
        self._keep(await self._run(partial(self._copied, slot)))

    async def _changed(
        self, change: Callable[[], None], *, copies: bool, is_round_over: bool = True
    ) -> Named | None:
        """Make an update in the compute thread and, in the same task, a copy of what it gives.

        None without a copy, or where it finds no memory: the update is whole then too.

        Args:
            is_round_over: no activations are held.
        """
        slot = self._slot() if copies else None
        return await self._run(partial(self._change_and_copy, change, slot, is_round_over))

    def _slot(self) -> Named:
        return self._store.slot(StateKind.KEPT, *self._units) or {}

    def _keep(self, kept: Named | None) -> None:
        version = self._tensors.version
        if kept is not None:
            self._store.put(StateKind.KEPT, *self._units, version, kept, {})
        self.on_kept(self._stage, version, None if kept is not None else "no memory")

    def _change_and_copy(
        self, change: Callable[[], None], slot: Named | None, is_round_over: bool
    ) -> Named | None:
        with beside_the_heap():
            change()
            kept = None if slot is None else self._copied(slot)
        if is_round_over:
            self._creep.round_ended()
        return kept

    def _copied(self, slot: Named) -> Named | None:
        try:
            return self._tensors.copied(slot)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    @property
    def _units(self) -> tuple[int, int]:
        return self._tensors.stage.first, self._tensors.stage.end


def _ignore_outcome(stage: int, version: Version, why_not: str | None) -> None:
    """A stage on its own."""
