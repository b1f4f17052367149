"""The second half of a training round in one stage: gradients ready, committed, applied.

    gradients complete ── ready, done ──► holder     all stages are: the update counts
    update, snapshot where one is due     ◄── commit

A stage is ready before it reports done, so that no stage is found unready after the commit. With an
optimistic update, a stage does not wait in between. It keeps the old state and begins the next
round, whose update waits for this commit: no stage is more than one update ahead.

    gradients complete ── ready, done ──► holder
    update, snapshot; next forwards ...   ◄── commit

In a group, an overlapped update lets the next round begin before all sums are there: before each
unit its first forward waits for the sums of that unit's gradients and updates what has all of its
sums (P3, Jayarajan et al., MLSys 2019; ByteScheduler, Peng et al., SOSP 2019). Here sums 3 to 5
were there when the backward ended:

    compute   ... B B |copy| F: wait 0 | unit 0 | wait 1, 2 | units 1, 2 | unit 3 ...
    wire      ... sums 5 4 3 | sum 0 . . . . . . | sums 1, 2 |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from p2ptrain import failpoints
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.messages.round_orders import Commit, RoundOrder
from p2ptrain.process.memory_budget import is_out_of_memory
from p2ptrain.runtime.allreduce_buckets import ArrivedSums
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.reduced_tensors import ReducedTensors
from p2ptrain.runtime.spans import SILENT, SpanRecorder
from p2ptrain.runtime.stage_snapshots import RunInCompute, StageSnapshots
from p2ptrain.state.snapshot_store import Named, SnapshotStore

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _ReadyUpdate:
    """An update that waits to count.

    Attributes:
        kept: a copy of what it gives, where one was asked for and there is memory.
    """

    order: RoundOrder
    kept: Named | None


class OptimizerStep(StageSnapshots):
    """The updates of one stage in one generation, one at a time."""

    def __init__(
        self,
        live: LiveStage,
        run: RunInCompute,
        store: SnapshotStore,
        *,
        device: str,
        stage: int,
        keeps: bool,
        goes_ahead: bool = False,
        spans: SpanRecorder = SILENT,
    ) -> None:
        """Update `live`; the rest as `StageSnapshots`.

        Args:
            goes_ahead: whether updates are made before they count; `run` lets them count then.
            spans: where it is noted how long commits were awaited.
        """
        super().__init__(live, run, store, device=device, stage=stage, keeps=keeps)
        self._live = live
        self._goes_ahead = goes_ahead
        self._spans = spans
        self._commit: asyncio.Future[Commit] | None = None  # of the update that is ready
        self._ahead: asyncio.Queue[_ReadyUpdate] = asyncio.Queue(1)
        self._settled = asyncio.Event()  # there is none to wait for
        self._settled.set()

    async def make(self, order: RoundOrder, say_done: Callable[[], Awaitable[None]]) -> None:
        """Be ready, say so, and make the round's update; it counts then, unless it is ahead."""
        began = perf_counter()
        await self._settled.wait()  # no stage is more than one update ahead of another
        self._note_wait(order, began)
        self._live.get_ready(order)
        self._settled.clear()
        self._commit = asyncio.get_running_loop().create_future()
        is_ahead = False
        try:
            await say_done()
            may_go = self._goes_ahead and not order.may_change_nothing
            is_ahead = may_go and await self._go_ahead(order)
            if not is_ahead:
                began = perf_counter()
                commit = await self._commit
                self._note_wait(order, began)
                apply = partial(self._live.apply, commit.coefficient)
                await self._counted(_ReadyUpdate(order, await self._made(order, apply)))
        finally:
            if not is_ahead:
                self._settled.set()

    async def begin(self, order: RoundOrder, *, leads: bool = False) -> bool:
        """Begin the round's update before all sums are there; False where memory lacks for that.

        `end` follows; else `make` does.

        Args:
            leads: all of it, before it is known whether its gradients are finite.
        """
        await self._settled.wait()
        await self._reach("update.begin.before", order)
        self._settled.clear()  # before it is begun: who reads meanwhile waits
        begin = self._live.lead if leads else self._live.begin_update
        has_begun = False
        try:
            await self._changed(partial(begin, order), copies=False)
            has_begun = True
        except (RuntimeError, MemoryError) as error:
            if self._live.torn or not is_out_of_memory(error):
                raise
            self._stays_behind(error)
        finally:
            if not has_begun:
                self._settled.set()
        return has_begun

    async def end(self, order: RoundOrder, say_done: Callable[[], Awaitable[None]]) -> None:
        """All sums are there: be ready, say so, and make what is left of the update."""
        self._live.get_ready(order)
        self._commit = asyncio.get_running_loop().create_future()
        await say_done()
        kept = await self._changed(
            self._live.end_update, copies=self._is_copied(order), is_round_over=False
        )
        await self._reach("update.end.after", order)
        self._ahead.put_nowait(_ReadyUpdate(order, kept))

    async def run(self) -> None:
        """Let updates that were made ahead count once they do, until cancelled."""
        try:
            while True:
                made = await self._ahead.get()
                assert self._commit is not None
                commit = await self._commit
                self._live.apply(commit.coefficient)  # touches no tensor
                await self._counted(made)
                self._settled.set()
        finally:
            self._settled.set()

    @property
    def goes_ahead(self) -> bool:
        """Whether updates are still made before they count."""
        return self._goes_ahead

    def commit(self, commit: Commit) -> None:
        """The update that this stage is ready for counts.

        Raises:
            ProtocolError: it is ready for another one, or for none.
        """
        place = {"stage": self._stage, "step": commit.step}
        failpoints.reach_now("commit.receive.before", device=self._device, **place)
        ready = self._live.ready
        if self._commit is None or self._commit.done() or ready is None:
            raise ProtocolError(f"a commit of update {commit.step} while none is awaited")
        if ready.step != commit.step + 1:
            raise ProtocolError(f"a commit of update {commit.step} instead of {ready.step - 1}")
        self._commit.set_result(commit)

    async def counted(self) -> None:
        """Wait until there is no update that this stage is ready for, made or not."""
        await self._settled.wait()

    async def settled(self) -> None:
        """As `counted`.

        Raises:
            PeerError: it was not made: the generation has ended before, or it has failed.
        """
        await self.counted()
        if self._live.torn or self._live.is_ahead or self._live.ready is not None:
            raise PeerError(f"update {self._live.version.step} was not made here")

    async def _go_ahead(self, order: RoundOrder) -> bool:
        """Make the update before it counts; False where there is no memory for what was before."""
        try:
            kept = await self._made(order, self._live.advance)
        except (RuntimeError, MemoryError) as error:
            if self._live.torn or not is_out_of_memory(error):
                raise
            self._stays_behind(error)
            return False
        self._ahead.put_nowait(_ReadyUpdate(order, kept))
        return True

    def _stays_behind(self, error: BaseException) -> None:
        log.info("not_ahead", stage=self._stage, why=str(error))
        self._goes_ahead = False

    async def _made(self, order: RoundOrder, change: Callable[[], None]) -> Named | None:
        """The copy of what it gives, where one is asked for and there is memory."""
        await self._reach("update.before", order)
        kept = await self._changed(change, copies=self._is_copied(order))
        await self._reach("update.after", order)
        return kept

    async def _counted(self, made: _ReadyUpdate) -> None:
        if self._is_copied(made.order):
            self._keep(made.kept)
        await self._reach("version.after", made.order)

    def _note_wait(self, order: RoundOrder, began: float) -> None:
        if self._spans.is_on:
            where = {"stage": self._stage, "round": order.round.index}
            self._spans.add_wait("wait commit", began, **where)

    def _is_copied(self, order: RoundOrder) -> bool:
        return order.keep and self._keeps

    async def _reach(self, name: str, order: RoundOrder) -> None:
        place = {"stage": self._stage, "step": order.round.step}
        await failpoints.reach(name, device=self._device, **place)


class OverlappedUpdate:
    """Of one stage and round, in the compute thread. Implements `program.Passing`."""

    def __init__(
        self, live: LiveStage, summed: ReducedTensors, arrived: ArrivedSums, micro_batches: int
    ) -> None:
        """Finish the update that `live` has begun.

        Args:
            summed: of the stage.
            arrived: sums of the update's round.
            micro_batches: of the round that begins.
        """
        self._live = live
        self._summed = summed
        self._arrived = arrived
        self._micro_batches = micro_batches
        self._there = frozenset[int]()  # sums of which the update is made

    def unit(self, number: int) -> None:
        """Wait for what that unit needs, and update all that can be.

        Raises:
            GivenUp: the round has been.
        """
        wanted = self._summed.buckets_of_units.get(number, frozenset())
        if wanted <= self._there:
            return
        self._there = self._arrived.wait(wanted)
        buckets = self._summed.buckets_of_names.items()
        self._live.update_some([name for name, numbers in buckets if numbers <= self._there])

    def end(self) -> None:
        """Wait for all the others; the round of this forward begins then.

        Raises:
            GivenUp: the round has been.
        """
        self._arrived.wait(range(len(self._summed.buckets)))
        self._live.end_update()
        self._live.save(self._micro_batches)
