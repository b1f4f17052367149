"""Hands a stage's finished values to the devices that need them, while the stage computes.

One queue and one task a receiving device, so that no device waits for another's slow link:

    compute --> slice of samples [0, 4) --+--> queue --> [0, 2) to c
                                          +--> queue --> [2, 4) to d

The schedule bounds a queue in a training round (a stage forwards at most K_p micro-batches ahead of
their backwards), credits bound it in an evaluation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from p2ptrain.devices.interface import HostCopies
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.tensors import MicroBatchSlice, SampleRange, Value
from p2ptrain.runtime.io.sample_division import SampleDivision

Send: TypeAlias = Callable[[str, MicroBatchSlice, Sequence[Value]], Awaitable[None]]
"""Device, what, values."""

PartOf: TypeAlias = Callable[[str, RoundMode, Sequence[Value]], Sequence[Value]]
"""Device, mode, whole values -> its part of them."""

_Queue: TypeAlias = asyncio.Queue[tuple[MicroBatchSlice, Sequence[Value], HostCopies]]
"""What, a device's part of the values, and all of them: they may be on their way from an
accelerator."""


class OutputQueues:
    """The ways to all devices of a neighbouring stage.

    Args:
        division: of that stage.
        dimensions: mode -> which dimension of each value counts samples; None = none does.
        send: carries one part over the link; waits until it is under way.
        capacity: pieces that may wait for one device.
        summed: whether the receivers sum what all samples share (gradients): then one of them gets
            it and the others None.
        part_of: where the receivers take tiles: what of whole values a device gets.
    """

    def __init__(
        self,
        division: SampleDivision,
        dimensions: Callable[[RoundMode], Sequence[int | None]],
        send: Send,
        *,
        capacity: int,
        summed: bool = False,
        part_of: PartOf | None = None,
    ) -> None:
        self._part_of = part_of
        self._division = division
        self._dimensions = dimensions
        self._send = send
        self._summed = summed
        self._queues: dict[str, _Queue] = {
            device: asyncio.Queue(capacity) for device in division.devices
        }

    async def put(self, piece: MicroBatchSlice, copies: HostCopies) -> None:
        """Queue a finished piece for all who have a part in it."""
        values = copies.tensors
        if self._part_of is not None:
            await copies.arrived()
        own = SampleRange("", piece.first, piece.end)
        parts = self._division.overlaps(piece.key.micro_batch, piece.size, own)
        for index, part in enumerate(parts):
            if self._part_of is not None:
                taken: Sequence[Value] = self._part_of(part.device, piece.mode, values)
            elif len(parts) == 1:
                taken = values
            else:
                taken = self._cut(piece, values, part, index == 0)
            await self._queues[part.device].put((piece.of(part), taken, copies))

    async def run(self) -> None:
        """Send until cancelled. Raises what `send` raises."""
        async with asyncio.TaskGroup() as group:
            for device, queue in self._queues.items():
                group.create_task(self._run(device, queue))

    async def _run(self, device: str, queue: _Queue) -> None:
        while True:
            piece, values, copies = await queue.get()
            await copies.arrived()
            await self._send(device, piece, values)
            del values, copies  # not kept while the queue is empty

    def _cut(
        self, piece: MicroBatchSlice, values: Sequence[Value], part: SampleRange, is_first: bool
    ) -> list[Value]:
        first = part.first - piece.first
        pairs = zip(values, self._dimensions(piece.mode), strict=True)
        return [self._cut_one(v, dimension, (first, part.size), is_first) for v, dimension in pairs]

    def _cut_one(
        self, value: Value, dimension: int | None, limits: tuple[int, int], is_first: bool
    ) -> Tensor | None:
        if value is None or (dimension is None and self._summed and not is_first):
            return None
        return value if dimension is None else value.narrow(dimension, *limits)
