"""The holder's side of the pipeline's ends: inputs to the first stage, targets to those that use
them, in the contract's order and at most two pieces ahead of the stage that works on them.

    loader --> pieces --+--> inputs  --(2 credits)--> stage 0
                        +--> targets --(2 credits)--> last stage

The two queues are independent, because the first stage runs a few pieces ahead of the last; they
are bounded by that lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from p2ptrain.net.message import PartKind
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.engagement import PIECES_AHEAD
from p2ptrain.training.inlet import Piece
from p2ptrain.training.switchboard import Credits, Line, Switchboard


@dataclass(frozen=True, slots=True)
class Feed:
    """One piece as the loader gives it: flattened tensors."""

    piece: Piece
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]


class Feeder:
    """Feeds one epoch."""

    def __init__(
        self, assignment: Assignment, target_stages: Sequence[int], switchboard: Switchboard
    ) -> None:
        lead = assignment.stages[0].warmup + 2 * PIECES_AHEAD
        self._inputs = _Pump(assignment, 0, "activations", switchboard, lead)
        self._targets = [
            _Pump(assignment, stage, "targets", switchboard, lead) for stage in target_stages
        ]

    async def run(self, feeds: AsyncIterator[Feed]) -> None:
        """Send everything `feeds` gives, then wait until it is sent."""
        async with asyncio.TaskGroup() as group:
            for pump in (self._inputs, *self._targets):
                group.create_task(pump.run())
            async for feed in feeds:
                await self._inputs.put(feed.piece, feed.inputs)
                for pump in self._targets:
                    await pump.put(feed.piece, feed.targets)
            for pump in (self._inputs, *self._targets):
                await pump.end()


class _Pump:
    """One bounded queue of pieces to one stage."""

    def __init__(
        self,
        assignment: Assignment,
        stage: int,
        flow: str,
        switchboard: Switchboard,
        lead: int,
    ) -> None:
        self._line = Line(assignment.key, stage, flow)
        self._device = assignment.stages[stage].device
        self._switchboard = switchboard
        self._credits = Credits(PIECES_AHEAD)
        self._queue: asyncio.Queue[tuple[Piece, Sequence[Tensor]] | None] = asyncio.Queue(lead)
        switchboard.connect_credits(self._line, self._credits, self._device)

    async def put(self, piece: Piece, values: Sequence[Tensor]) -> None:
        await self._queue.put((piece, values))

    async def end(self) -> None:
        await self._queue.put(None)

    async def run(self) -> None:
        while (item := await self._queue.get()) is not None:
            piece, values = item
            await self._credits.acquire()
            await self._switchboard.send_values(
                self._device, self._line, piece, values, PartKind.INPUT
            )
