"""Exchanges gradients of whole mini-batches in a group whose devices take mini-batches in turn.

    a   F0      F2  B0 ──g0──► F4  B2 ──g2──►     every device makes update 0, 1, 2, ... in this
    b       F1  ◄──g0── F3  B1 ──g1──► ...        order, with the gradients of the one that has them

So the devices have the same weights to the bit, and a mini-batch sees the version that the delays
prescribe on any of them. `UpdateOrder` makes all updates of the stage in order:

    due      t, t+1, ...     gradients: this device's own, or another's over the exchange
    limit    no update beyond what this device's next forward sees: its weights would be too new

An update waits for its gradients and for the forwards of this device that must not see it; a
forward waits for the updates that it must see. Nothing else waits: a device with a small share
makes the others' updates while it has nothing to compute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from p2ptrain.devices.interface import Arrived
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, SampleRange, StreamId
from p2ptrain.model.stage.stage import Stage
from p2ptrain.net.message import PartKind, Priority
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.io.tensor_receiver import TensorReceiver, gradient_contents
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.runtime.stage_io import OutputQueues

FLOW = "mini-batch gradients"

Gradients: TypeAlias = Sequence[Tensor | None]


class _OtherDevices(SampleDivision):
    """Each of them gets all that this device has."""

    def __init__(self, place: StageAssignment, me: str) -> None:
        super().__init__(place)
        self.devices = tuple(device for device in place.devices if device != me)

    def overlaps(self, micro_batch: int, size: int, own: SampleRange) -> tuple[SampleRange, ...]:
        """All samples, for every one of them."""
        return tuple(replace(own, device=device) for device in self.devices)


class GradientExchange:
    """This device's end of it, for one stage in one generation; `run` it while the stage runs."""

    def __init__(
        self, assignment: Assignment, index: int, stage: Stage, me: str, router: TensorRouter
    ) -> None:
        place = assignment.stages[index]
        self._division = SampleDivision(place)
        self._me = me
        self._router = router
        self._stream = StreamId(assignment.key, index, FLOW)
        others = _OtherDevices(place, me)
        trained = [p for p in stage.parameters().values() if p.requires_grad]
        contents = gradient_contents(f"gradients of mini-batches of stage {index}", trained)
        # a device is ahead of another by what is under way in the stage, at most
        self._queues = OutputQueues(others, contents.dimensions, self._send, capacity=place.warmup)
        capacity = 2 * place.warmup + len(others.devices)
        self._receiver = TensorReceiver(contents, self._sources, capacity=capacity, largest=1)
        router.connect_tensors(self._stream, self._receiver, others.devices)

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

    async def put(self, key: MicroBatchKey, gradients: Sequence[Tensor | None]) -> None:
        """Send the others the gradients of a mini-batch of this device."""
        await self._queues.put(MicroBatchSlice.whole(key, RoundMode.TRAIN, 1), Arrived(gradients))

    async def take(self, key: MicroBatchKey) -> Sequence[Tensor | None]:
        """Wait for what another device's mini-batch gives."""
        return (await self._receiver.take(key)).join()

    async def run(self) -> None:
        """Send until cancelled. Raises LinkClosed."""
        await self._queues.run()

    async def _send(self, device: str, piece: MicroBatchSlice, gradients: Gradients) -> None:
        kinds = (PartKind.GRADIENT, Priority.COLLECTIVE)
        await self._router.send_values(device, self._stream, piece, gradients, *kinds)

    def _sources(self, number: int, size: int) -> Sequence[SampleRange]:
        owner = self._owner(number)
        return () if owner == self._me else (SampleRange(owner, 0, size),)


Make: TypeAlias = Callable[[RoundOrder, Gradients], Awaitable[None]]
"""Makes the update of a mini-batch with its gradients, and reports it."""


class UpdateOrder:
    """See the module. `run` it while the stage runs.

    Args:
        exchange: with the other devices.
        make: makes an update.
    """

    def __init__(self, exchange: GradientExchange, make: Make) -> None:
        self._exchange = exchange
        self._make = make
        self._coming: deque[RoundOrder] = deque()
        self._own: dict[int, Gradients] = {}  # by round
        self._limit: int | None = 0
        self._changed = asyncio.Condition()

    async def come(self, order: RoundOrder) -> None:
        """A mini-batch is taken by some device of the stage; in order."""
        async with self._changed:
            self._coming.append(order)
            self._changed.notify_all()

    async def give(self, order: RoundOrder, gradients: Gradients) -> None:
        """This device's own mini-batch has been through: for the others too."""
        await self._exchange.put(_key(order), gradients)
        async with self._changed:
            self._own[order.round.index] = gradients
            self._changed.notify_all()

    async def allow(self, updates: int | None) -> None:
        """So many updates may be made before the next forward here; None = any number."""
        async with self._changed:
            self._limit = updates
            self._changed.notify_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for what becomes so by an update."""
        async with self._changed:
            await self._changed.wait_for(is_so)

    async def finished(self) -> None:
        """Wait until the update of every mini-batch that has come is made."""
        await self.until(lambda: not self._coming)

    async def run(self) -> None:
        """Make them, until cancelled. Raises what `make` raises."""
        while True:
            await self.until(lambda: bool(self._coming))
            order = self._coming[0]
            gradients = await self._gradients(order)
            await self._until_allowed(order.round.step)
            await self._make(order, gradients)
            async with self._changed:
                self._coming.popleft()
                self._changed.notify_all()

    async def _gradients(self, order: RoundOrder) -> Gradients:
        if not self._exchange.is_own(order.round.first):
            return await self._exchange.take(_key(order))
        index = order.round.index
        await self.until(lambda: index in self._own)
        return self._own.pop(index)

    async def _until_allowed(self, step: int) -> None:
        await self.until(lambda: self._limit is None or step < self._limit)


def _key(order: RoundOrder) -> MicroBatchKey:
    return MicroBatchKey(order.round.index, order.round.first)
