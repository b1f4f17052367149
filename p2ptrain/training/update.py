"""The second half of a round of training, of one stage: ready, told that it counts, applied.

    gradients complete ── ready, done ──► holder     all stages are: the update counts
    update, copy where one is to be kept  ◄── commit

Ready comes before done is said: nobody may find a stage unready whose update counts already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from p2ptrain import failpoints
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.training.live_stage import LiveStage
from p2ptrain.training.protocol import Commit, RoundOrder
from p2ptrain.training.stage_copies import Run, StageCopies
from p2ptrain.training.versions import VersionStore


class Update(StageCopies):
    """The updates of one stage in one epoch, one at a time."""

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
        """Update `live`; the rest as `StageCopies`."""
        super().__init__(live, run, store, device=device, stage=stage, keeps=keeps)
        self._live = live
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

    async def _apply(self, order: RoundOrder, commit: Commit) -> None:
        copies = order.keep and self._keeps
        apply = partial(self._live.apply, commit.coefficient)
        kept = await self._changed(apply, copies=copies)
        if failpoints.armed:
            await self._reach("update.after", order)
        if copies:
            self._keep(kept)

    async def _reach(self, name: str, order: RoundOrder) -> None:
        place = {"stage": self._stage, "step": order.round.step}
        await failpoints.reach(name, device=self._device, **place)
