"""Gradients of whole mini-batches between the devices of a stage that take them in turn.

    a   F0      F2  B0 ──g0──► F4  B2 ──g2──►          everybody makes update 0, 1, 2, ... in this
    b       F1  ◄──g0── F3  B1 ──g1──► ...             order, with the gradients of whoever has them

So the devices have the same weights to the bit, and a mini-batch sees those that the delays say,
whoever takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from p2ptrain.model.stage import Stage
from p2ptrain.net.message import PartKind, Priority
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.division import Division, Slice
from p2ptrain.training.inlet import Contents, Expected, Inlet, Piece
from p2ptrain.training.protocol import PieceKey
from p2ptrain.training.rounds import Mode
from p2ptrain.training.switchboard import Line, Switchboard

FLOW = "mini-batch gradients"


class GradientExchange:
    """This device's end of it, for one stage in one epoch; `run` it while the stage runs."""

    def __init__(
        self, assignment: Assignment, index: int, stage: Stage, me: str, switchboard: Switchboard
    ) -> None:
        place = assignment.stages[index]
        self._division = Division(place)
        self._me = me
        self._switchboard = switchboard
        self._line = Line(assignment.key, index, FLOW)
        others = [device for device in place.devices if device != me]
        # a device is ahead of another by what is under way in the stage, at most
        self._queues: Mapping[str, asyncio.Queue[tuple[Piece, Sequence[Tensor | None]]]] = {
            device: asyncio.Queue(place.warmup) for device in others
        }
        expected: list[Expected] = [
            (p.dtype, tuple(p.shape)) for p in stage.parameters().values() if p.requires_grad
        ]
        contents = Contents(
            f"gradients of mini-batches of stage {index}",
            lambda _mode, _size: expected,
            lambda _mode: [None] * len(expected),
            optional=True,
        )
        capacity = 2 * place.warmup + len(others)
        self._inlet = Inlet(contents, self._sources, capacity=capacity, largest=1)
        switchboard.connect_inlet(self._line, self._inlet, others)

    def is_own(self, number: int) -> bool:
        """Whether this device takes a mini-batch."""
        return self._owner(number) == self._me

    def next_own(self, number: int) -> int:
        """The first from `number` on that this device takes."""
        while not self.is_own(number):
            number += 1
        return number

    def _owner(self, number: int) -> str:
        (part,) = self._division.slices(number, 1)
        return part.device

    async def put(self, key: PieceKey, gradients: Sequence[Tensor | None]) -> None:
        """Tell the others what a mini-batch of this device gives."""
        for queue in self._queues.values():
            await queue.put((Piece.whole(key, Mode.TRAIN, 1), gradients))

    async def take(self, key: PieceKey) -> Sequence[Tensor | None]:
        """Wait for what another device's mini-batch gives."""
        return (await self._inlet.take(key)).join()

    async def run(self) -> None:
        """Send until cancelled. Raises LinkClosed."""
        async with asyncio.TaskGroup() as group:
            for device, queue in self._queues.items():
                group.create_task(self._run(device, queue))

    async def _run(
        self, device: str, queue: asyncio.Queue[tuple[Piece, Sequence[Tensor | None]]]
    ) -> None:
        send = self._switchboard.send_values
        while True:
            piece, gradients = await queue.get()
            kinds = (PartKind.GRADIENT, Priority.COLLECTIVE)
            await send(device, self._line, piece, gradients, *kinds)
            del gradients  # not kept while the queue is empty

    def _sources(self, number: int, size: int) -> Sequence[Slice]:
        owner = self._owner(number)
        return () if owner == self._me else (Slice(owner, 0, size),)
