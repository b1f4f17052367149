"""Runs one stage's schedule without a barrier, mini-batch after mini-batch.

Every stage decides by itself: K_p forwards (n-p in a straight pipeline), then a backward and a
forward in turn, an update after each mini-batch's last backward. It receives orders, no commits:

    orders      train t, t+1, ...     evaluate        train t', ...        no more
    this stage  F F B F B F B  ... B  | F F F ...  |  F F B F B ...  ... B |
                 |- one stretch ----|  (drained)

A stretch ends at an evaluation or at the last order: the remaining backwards are done, so that the
next stretch begins with an empty pipeline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial

from p2ptrain.devices.interface import HostCopies
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.round_orders import Commit, RoundOrder
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.runtime.asynchronous.delayed_stage import DelayedStage
from p2ptrain.runtime.asynchronous.gradient_exchange import GradientExchange, Gradients, UpdateOrder
from p2ptrain.runtime.executor import StageExecutor, StageSpec
from p2ptrain.runtime.not_finite import broken_update
from p2ptrain.runtime.stage_io import StageIo, StageSender
from p2ptrain.runtime.stage_snapshots import StageSnapshots
from p2ptrain.state.snapshot_store import SnapshotStore

ORDERS_AHEAD = 3
"""Orders beyond those whose mini-batches are under way: a stage looks one ahead, to know whether a
forward still comes, and words take their time."""


def orders_under_way(depths: Sequence[int]) -> int:
    """Most orders that the holder has given whose end is not reported."""
    return depths[0] + ORDERS_AHEAD


class AsyncOptimizerStep(StageSnapshots):
    """The updates of a stage that waits for no other."""

    async def make(
        self, live: DelayedStage, order: RoundOrder, gradients: Gradients | None
    ) -> None:
        """Apply a mini-batch's gradients; keep a copy where the order says so.

        Args:
            gradients: None = those that its backwards here have just made.

        Raises:
            MicroBatchNotFinite: it is not, and has not been made.
        """
        live.check_step(order.round.step)
        copies = order.keep and self._keeps
        kept = await self._changed(partial(_update, live, order, gradients), copies=copies)
        if copies:
            self._keep(kept)

    async def settled(self) -> None:
        """Snapshots are exactly those ordered: one is made before its update is reported.

        Raises:
            PeerError: an update has failed half-way.
        """
        if self._tensors.torn:
            raise PeerError(f"the update after {self._tensors.version.step} was not made here")


class _PendingOrders:
    """What the holder wants next, in order; bounded by what it may have under way."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[RoundOrder] = deque()
        self._taken = 0
        self._end: int | None = None
        self._changed = asyncio.Event()

    def put(self, order: RoundOrder) -> None:
        if len(self._waiting) >= self._limit:
            raise ProtocolError(f"more than {self._limit} rounds were ordered ahead")
        self._waiting.append(order)
        self._changed.set()

    def end(self, rounds: int) -> None:
        """There are so many in this generation, and no more."""
        self._end = rounds
        self._changed.set()

    async def peek(self) -> RoundOrder | None:
        """Wait for the next one; None = there will be none."""
        while not self._waiting and self._taken != self._end:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting[0] if self._waiting else None

    def take(self) -> None:
        """The one seen by `peek` is dealt with."""
        self._waiting.popleft()
        self._taken += 1


class AsyncStageExecutor(StageExecutor):
    """One stage on this device, for one generation of asynchronous training.

    Attributes:
        live: its tensors.
        update: its updates, and copies of it.
    """

    def __init__(
        self,
        task: StageSpec,
        live: DelayedStage,
        links: StageSender,
        io: StageIo,
        compute: ComputeThread,
        store: SnapshotStore,
        depths: Sequence[int],
        exchange: GradientExchange | None,
    ) -> None:
        """As `SyncStageExecutor`.

        Args:
            depths: of all stages.
            exchange: with the stage's other devices; None where this one is alone.
        """
        super().__init__(task, live, links, io, compute)
        self.live = live
        self.update = AsyncOptimizerStep(
            live, self._run_update, store, device=task.device, stage=task.index, keeps=task.keeps
        )
        self._depth = depths[task.index]
        self._exchange = exchange
        self._turns = None if exchange is None else UpdateOrder(exchange, self._make_update)
        self._orders = _PendingOrders(orders_under_way(depths))
        self._losses: dict[int, float] = {}  # by round, of those under way
        self.waits_for_group = exchange is not None

    async def order(self, order: RoundOrder) -> None:
        """Queue a mini-batch or an evaluation."""
        self._orders.put(order)

    def no_more(self, rounds: int) -> None:
        """So many are ordered in this generation, and none after them."""
        self._orders.end(rounds)

    def commit(self, commit: Commit) -> None:
        """There is none to commit. Raises ProtocolError."""
        raise ProtocolError(f"a commit of update {commit.step} in asynchronous training")

    async def run(self) -> None:
        """As `StageExecutor.run`."""
        async with asyncio.TaskGroup() as group:
            for part in (self._exchange, self._turns):
                if part is not None:
                    group.create_task(part.run())
            group.create_task(super().run())

    async def _serve(self) -> None:
        while (order := await self._orders.peek()) is not None:
            if order.round.mode is RoundMode.TRAIN:
                await self._train()
            else:
                self._orders.take()
                await self._report(order, await self._evaluate(order))

    async def _train(self) -> None:
        """A stretch, from an empty pipeline to an empty one.

        The order is the stage's, whichever device takes a mini-batch; this device leaves out the
        others'.
        """
        await self._run((0, self.task.index), self.live.begin)
        under_way: deque[tuple[RoundOrder, int]] = deque()
        async for order, number in self._numbers():
            if not under_way:
                await self._allow(order, number)
            await self._forward(order, number)
            under_way.append((order, number))
            if len(under_way) == self._depth:
                await self._backward(*under_way.popleft())
        if self._turns is not None:
            await self._turns.allow(None)
        while under_way:
            await self._backward(*under_way.popleft())
        if self._turns is not None:
            await self._turns.finished()

    async def _numbers(self) -> AsyncIterator[tuple[RoundOrder, int]]:
        while (order := await self._orders.peek()) is not None:
            if order.round.mode is not RoundMode.TRAIN:
                return
            self._orders.take()
            for number in order.round.numbers:
                yield order, number

    async def _forward(self, order: RoundOrder, number: int) -> None:
        piece, shape = self.task.piece(order.round, number), order.round
        if self._turns is not None:
            await self._turns.come(order)
        if piece is None:
            return
        if self._turns is not None:
            needed = self.live.needed(shape.step)
            await self._turns.until(lambda: self.live.version.step >= needed)
        forward = partial(
            self.live.forward,
            number,
            shape.step,
            seed=(self.task.seed, shape.step, number - shape.first),
            is_last=number == shape.numbers[-1],
        )
        loss = await self._compute_forward(order, piece, forward)
        self._losses[shape.index] = self._losses.get(shape.index, 0.0) + loss
        await self._allow(order, number + 1)

    async def _allow(self, order: RoundOrder, number: int) -> None:
        """Updates that this device's next forward, of mini-batch `number` or later, sees."""
        if self._turns is not None and self._exchange is not None:
            step = self._exchange.next_own(number) - order.round.first + order.round.step
            await self._turns.allow(self.live.needed(step))

    async def _backward(self, order: RoundOrder, number: int) -> None:
        piece, is_last = self.task.piece(order.round, number), number == order.round.numbers[-1]
        if piece is None:
            return
        backward = partial(self.live.stage.backward, number)
        await self._compute_backward(order, piece, backward)
        if not is_last:
            return
        if self._turns is None:
            await self._make_update(order, None)
            return
        take = partial(self._gradients_out, order.round.step)
        copies = await self._run((0, self.task.index), take)
        await copies.arrived()
        await self._turns.give(order, copies.tensors)

    def _gradients_out(self, step: int) -> HostCopies:
        return self._device.copy_out(self.live.gradients(step))

    async def _make_update(self, order: RoundOrder, gradients: Gradients | None) -> None:
        await self.update.make(self.live, order, gradients)
        await self._report(order, self._losses.pop(order.round.index, 0.0))


def _update(live: DelayedStage, order: RoundOrder, gradients: Gradients | None) -> None:
    if gradients is None:
        gradients = live.gradients(order.round.step)
    gradients = live.stage.device.copied_in(gradients)
    if order.counts_nothing:
        gradients = [None] * len(gradients)
    broken = live.broken(gradients, order.numbers)
    if broken is not None:
        stage, step = live.stage, order.round.step + 1
        raise broken_update(broken, step, stage.description, stage.first, stage.end)
    live.update(gradients, order.numbers)
