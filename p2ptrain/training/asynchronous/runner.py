"""Carries out one stage's schedule without a barrier, mini-batch after mini-batch.

Every stage decides by itself: n-p forwards, then a backward and a forward in turn, an update after
each mini-batch's last backward. It is told what comes, and never to apply anything:

    orders      train t, t+1, ...     evaluate        train t', ...        no more
    this stage  F F B F B F B  ... B  | F F F ...  |  F F B F B ...  ... B |
                 |- one stretch ----|  (drained)

A stretch ends where an evaluation comes, or nothing: then the remaining backwards are made, so that
the next one begins with an empty pipeline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.training.asynchronous.delayed_stage import DelayedStage
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.inlet import Piece
from p2ptrain.training.piece_runner import PieceRunner, StageTask, draw
from p2ptrain.training.protocol import Commit, RoundOrder
from p2ptrain.training.rounds import Mode
from p2ptrain.training.stage_copies import StageCopies
from p2ptrain.training.stage_ends import Lines, StageLinks
from p2ptrain.training.versions import VersionStore

ORDERS_AHEAD = 3
"""Orders beyond those whose mini-batches are under way: a stage looks one ahead, to know whether a
forward still comes, and words take their time."""


def orders_under_way(stages: int) -> int:
    """Most orders that the holder has given and not heard the end of."""
    return stages + ORDERS_AHEAD


class DelayedUpdate(StageCopies):
    """The updates of a stage that waits for nobody."""

    async def make(self, live: DelayedStage, order: RoundOrder) -> None:
        """Apply the mini-batch's gradients; keep a copy where the order says so."""
        live.check_step(order.round.step)
        copies = order.keep and self._keeps
        kept = await self._changed(partial(live.update, order.lr_factor), copies=copies)
        if copies:
            self._keep(kept)

    async def settled(self) -> None:
        """What is kept here is as it was ordered: a copy is made before anybody hears of it.

        Raises:
            PeerError: an update has failed half-way.
        """
        if self._tensors.torn:
            raise PeerError(f"the update after {self._tensors.version.step} was not made here")


class _Orders:
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
        """There are so many in this epoch, and no more."""
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


class DelayedRunner(PieceRunner):
    """One stage on this device, for one epoch of asynchronous training.

    Attributes:
        live: its tensors.
        update: its updates, and copies of it.
    """

    def __init__(
        self,
        task: StageTask,
        live: DelayedStage,
        links: StageLinks,
        lines: Lines,
        compute: ComputeThread,
        store: VersionStore,
        stages: int,
    ) -> None:
        """`stages`: of the whole pipeline; the rest as `StageRunner`."""
        super().__init__(task, live, links, lines, compute)
        self.live = live
        run = partial(self._run, (0, task.index))
        self.update = DelayedUpdate(
            live, run, store, device=task.device, stage=task.index, keeps=task.keeps
        )
        self._depth = stages - task.index
        self._orders = _Orders(orders_under_way(stages))
        self._losses: dict[int, float] = {}  # by round, of those under way

    async def order(self, order: RoundOrder) -> None:
        """Queue a mini-batch or an evaluation."""
        self._orders.put(order)

    def no_more(self, rounds: int) -> None:
        """So many are ordered in this epoch, and none after them."""
        self._orders.end(rounds)

    def commit(self, commit: Commit) -> None:
        """Nobody waits for one. Raises ProtocolError."""
        raise ProtocolError(f"a commit of update {commit.step} in asynchronous training")

    async def _serve(self) -> None:
        while (order := await self._orders.peek()) is not None:
            if order.round.mode is Mode.TRAIN:
                await self._train()
            else:
                self._orders.take()
                await self._report(order, await self._evaluate(order))

    async def _train(self) -> None:
        """A stretch, from an empty pipeline to an empty one."""
        await self._run((0, self.task.index), self.live.begin)
        under_way: deque[tuple[RoundOrder, Piece]] = deque()
        async for order, piece in self._pieces():
            await self._forward(order, piece)
            under_way.append((order, piece))
            if len(under_way) == self._depth:
                await self._backward(*under_way.popleft())
        while under_way:
            await self._backward(*under_way.popleft())

    async def _pieces(self) -> AsyncIterator[tuple[RoundOrder, Piece]]:
        while (order := await self._orders.peek()) is not None:
            if order.round.mode is not Mode.TRAIN:
                return
            self._orders.take()
            for piece in self.task.pieces(order.round):
                yield order, piece

    async def _forward(self, order: RoundOrder, piece: Piece) -> None:
        held_as, weight = _held_as(order, piece), piece.samples / order.round.samples
        forward = partial(
            self.live.forward,
            held_as,
            order.round.step,
            weight=weight if self.task.last else None,
            seed=(self.task.seed, order.round.step, draw(piece)),
            is_last=_is_last(order, piece),
        )
        loss = await self._compute_forward(order, piece, forward, held_as)
        index = order.round.index
        self._losses[index] = self._losses.get(index, 0.0) + loss

    async def _backward(self, order: RoundOrder, piece: Piece) -> None:
        backward = partial(self.live.stage.backward, _held_as(order, piece))
        await self._compute_backward(order, piece, backward)
        if _is_last(order, piece):
            await self.update.make(self.live, order)
            await self._report(order, self._losses.pop(order.round.index))


def _is_last(order: RoundOrder, piece: Piece) -> bool:
    return piece.key.micro_batch == order.round.micro_batches - 1


def _held_as(order: RoundOrder, piece: Piece) -> int:
    """Pieces of several mini-batches are under way: a number of its own for each."""
    return order.round.index * order.round.micro_batches + piece.key.micro_batch
