"""What a stage's executor is connected to: its inputs, and where its results go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from p2ptrain.devices.interface import HostCopies
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.round_orders import RoundOrder, RoundReport
from p2ptrain.messages.tensors import MicroBatchSlice, SampleRange, Value
from p2ptrain.runtime.allreduce import RingAllReduce
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.io.tensor_receiver import TensorReceiver
from p2ptrain.runtime.spans import SILENT, SpanRecorder


class StageSender(Protocol):
    """Where a stage's results go, besides its output queues."""

    async def send_output(self, piece: MicroBatchSlice, values: Sequence[Value]) -> None:
        """The model's outputs of an evaluated piece, to the holder."""

    async def send_started(self, piece: MicroBatchSlice, targets: bool) -> None:
        """Credit: the feeder of activations (or targets) may send one more slice."""

    async def exchange_gradients(self, order: RoundOrder) -> bool:
        """Sum the gradients of tied tensors over the stages that share them; False: none are."""

    async def send_norms(self, order: RoundOrder) -> None:
        """Where the job clips: what the holder makes the clipping coefficient of."""

    async def report(self, report: RoundReport) -> None:
        """Report to the holder that the round is done here."""


class DiscardedOutput:
    """Takes the place of `OutputQueues` for a stage whose results others have already."""

    async def put(
        self, piece: MicroBatchSlice, copies: HostCopies, values: Sequence[Value] | None = None
    ) -> None:
        """Forget it."""

    async def run(self) -> None:
        """There is nothing to do."""


@dataclass(frozen=True, slots=True)
class TiedGradient:
    """The way of one tied parameter's gradients, micro-batch by micro-batch.

    Attributes:
        later: what later stages have made; None at the last stage that uses the parameter.
        earlier: to the stage before that uses it; None at the first.
    """

    later: TensorReceiver | None
    earlier: OutputQueues | None


@dataclass(frozen=True, slots=True)
class StageIo:
    """What a stage on this device is connected to.

    Attributes:
        activations, targets, gradients: what comes in; no gradients at the last stage, and in front
            of the first trained weight.
        forward: to the next stage; None at the last.
        backward: to the stage before; None where that receives no gradients.
        reduction: with the other devices of the stage; None where this one is alone.
        tied: of each of the stage's tied parameters, in its order.
        spans: where it is noted what the stage does.
    """

    activations: TensorReceiver
    targets: TensorReceiver
    gradients: TensorReceiver | None
    forward: OutputQueues | DiscardedOutput | None
    backward: OutputQueues | DiscardedOutput | None
    reduction: RingAllReduce | None
    tied: Sequence[TiedGradient] = ()
    spans: SpanRecorder = SILENT


Send: TypeAlias = Callable[[str, MicroBatchSlice, Sequence[Value]], Awaitable[None]]
"""Device, what, values."""

PartOf: TypeAlias = Callable[[str, RoundMode, Sequence[Value]], Sequence[Value]]
"""Device, mode, whole values -> its part of them."""

_Queue: TypeAlias = asyncio.Queue[tuple[MicroBatchSlice, Sequence[Value], HostCopies] | None]
"""What, a device's part of the values, and all of them: they may be on their way from an
accelerator. None at the end."""


class OutputQueues:
    """Hands a stage's finished values to the devices of a neighbouring stage, while it computes.

    One queue and one task a receiving device, so that no device waits for another's slow link:

        compute --> slice of samples [0, 4) --+--> queue --> [0, 2) to c
                                              +--> queue --> [2, 4) to d

    The schedule bounds a queue in a training round (a stage forwards at most K_p micro-batches
    ahead of their backwards), credits bound it in an evaluation.

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

    async def put(
        self, piece: MicroBatchSlice, copies: HostCopies, values: Sequence[Value] | None = None
    ) -> None:
        """Queue a finished piece for all who have a part in it.

        Args:
            values: those of `copies` that go this way; None = all.
        """
        values = copies.tensors if values is None else values
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
            await self.give(part.device, piece.of(part), taken, copies)

    async def give(
        self, device: str, piece: MicroBatchSlice, values: Sequence[Value], copies: HostCopies
    ) -> None:
        """Queue one device's part; `values` are of `copies`, or cut from them."""
        await self._queues[device].put((piece, values, copies))

    async def end(self) -> None:
        """Nothing more will come."""
        for queue in self._queues.values():
            await queue.put(None)

    async def run(self) -> None:
        """Send until the end, or cancelled. Raises what `send` raises."""
        async with asyncio.TaskGroup() as group:
            for device, queue in self._queues.items():
                group.create_task(self._run(device, queue))

    async def _run(self, device: str, queue: _Queue) -> None:
        while (item := await queue.get()) is not None:
            piece, values, copies = item
            await copies.arrived()
            await self._send(device, piece, values)
            del item, values, copies  # not kept while the queue is empty

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
