"""The second half of a round of training, of one stage: ready, told that it counts, applied.

    gradients complete ── ready, done ──► holder     all stages are: the update counts
    update, copy where one is to be kept  ◄── commit

Ready comes before done is said: nobody may find a stage unready whose update counts already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from p2ptrain import failpoints
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.training.budget import is_out_of_memory
from p2ptrain.training.live_stage import LiveStage
from p2ptrain.training.protocol import Commit, RoundOrder
from p2ptrain.training.recovery.holdings import Kind
from p2ptrain.training.recovery.version import Version
from p2ptrain.training.versions import Named, VersionStore

T = TypeVar("T")

OnKept: TypeAlias = Callable[[int, Version, str | None], None]
"""(stage, version, why there is no copy of it; None where there is one)."""


class Run(Protocol):
    """Runs a function in the compute thread."""

    async def __call__(self, function: Callable[[], T]) -> T:
        """Returns or raises what it does."""


class Update:
    """The updates of one stage in one epoch, one at a time.

    Attributes:
        on_kept: told of every copy that was asked for, on the event loop, once it is there.
    """

    def __init__(
        self,
        live: LiveStage,
        run: Run,
        store: VersionStore,
        *,
        device: str,
        stage: int,
        keeps: bool,
    ) -> None:
        """Update `live`.

        Args:
            store: where copies go.
            device: this one.
            stage: its number, for `on_kept`.
            keeps: whether this device copies when a round's order says so.
        """
        self.on_kept: OnKept = _nobody_listens
        self._live = live
        self._run = run
        self._store = store
        self._device = device
        self._stage = stage
        self._keeps = keeps
        self._commit: asyncio.Future[Commit] | None = None  # of the update that is ready
        self._settled = asyncio.Event()  # there is none to wait for
        self._settled.set()

    async def make(self, order: RoundOrder, say_done: Callable[[], Awaitable[None]]) -> None:
        """Be ready, say so, and make the round's update once it counts."""
        self._live.get_ready(order)
        self._settled.clear()
        self._commit = asyncio.get_running_loop().create_future()
        try:
            await say_done()
            commit = await self._commit
            if failpoints.armed:
                await self._reach("update.before", order)
            await self._apply(order, commit)
            if failpoints.armed:
                await self._reach("version.after", order)
        finally:
            self._settled.set()

    def commit(self, commit: Commit) -> None:
        """The update that this stage is ready for counts.

        Raises:
            ProtocolError: it is ready for another one, or for none.
        """
        if failpoints.armed:
            place = {"stage": self._stage, "step": commit.step}
            failpoints.reach_now("commit.receive.before", device=self._device, **place)
        ready = self._live.ready
        if self._commit is None or self._commit.done() or ready is None:
            raise ProtocolError(f"a commit of update {commit.step} while none is awaited")
        if ready.step != commit.step + 1:
            raise ProtocolError(f"a commit of update {commit.step} instead of {ready.step - 1}")
        self._commit.set_result(commit)

    async def settled(self) -> None:
        """Wait until there is no update that this stage is ready for.

        Raises:
            PeerError: it was not made: the epoch has ended before, or it has failed.
        """
        await self._settled.wait()
        if self._live.torn or self._live.ready is not None:
            raise PeerError(f"update {self._live.version.step} was not made here")

    async def copy(self) -> None:
        """Keep a copy of the stage as it is, before its first round."""
        slot = self._slot()
        self._keep(await self._run(partial(self._copied, slot)))

    async def _apply(self, order: RoundOrder, commit: Commit) -> None:
        keeps = order.keep and self._keeps
        slot = self._slot() if keeps else None
        kept = await self._run(partial(self._apply_and_copy, commit, slot))
        if failpoints.armed:
            await self._reach("update.after", order)
        if keeps:
            self._keep(kept)

    def _slot(self) -> Named:
        return self._store.slot(Kind.KEPT, *self._units) or {}

    def _keep(self, kept: Named | None) -> None:
        if kept is not None:
            self._store.put(Kind.KEPT, *self._units, self._live.version, kept, {})
        self.on_kept(self._stage, self._live.version, None if kept is not None else "no memory")

    def _apply_and_copy(self, commit: Commit, slot: Named | None) -> Named | None:
        """None without a slot, or where the copy finds no memory: the update is whole then too."""
        self._live.apply(commit.coefficient)
        return None if slot is None else self._copied(slot)

    def _copied(self, slot: Named) -> Named | None:
        try:
            return self._live.copied(slot)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    async def _reach(self, name: str, order: RoundOrder) -> None:
        place = {"stage": self._stage, "step": order.round.step}
        await failpoints.reach(name, device=self._device, **place)

    @property
    def _units(self) -> tuple[int, int]:
        return self._live.stage.first, self._live.stage.end


def _nobody_listens(stage: int, version: Version, why_not: str | None) -> None:
    """A stage on its own."""
