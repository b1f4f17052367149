"""Updates of devices that take mini-batches in turn: when each is made, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
import torch

from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.messages.tensors import MicroBatchKey
from p2ptrain.runtime.asynchronous.gradient_exchange import GradientExchange, Gradients, UpdateOrder

pytestmark = pytest.mark.timeout(10)


class Exchange:
    """Even mini-batches are this device's; the others' gradients come when a test says so."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self._arrived: dict[int, asyncio.Future[Gradients]] = {}

    def is_own(self, number: int) -> bool:
        return number % 2 == 0

    async def put(self, key: MicroBatchKey, gradients: Gradients) -> None:
        self.told.append(key.micro_batch)

    async def take(self, key: MicroBatchKey) -> Gradients:
        return await self._of(key.micro_batch)

    def arrive(self, number: int) -> None:
        self._of(number).set_result([torch.tensor(float(number))])

    def _of(self, number: int) -> asyncio.Future[Gradients]:
        return self._arrived.setdefault(number, asyncio.get_running_loop().create_future())


def order(step: int) -> RoundOrder:
    return RoundOrder(Round(step, RoundMode.TRAIN, step, 8, 8, step))


class Device:
    """Turns, and the updates that they have made: (step, whose gradients)."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.made: list[tuple[int, int]] = []
        self.turns = UpdateOrder(cast(GradientExchange, self.exchange), self._make)

    async def _make(self, what: RoundOrder, gradients: Gradients) -> None:
        (gradient,) = cast(Sequence[torch.Tensor], gradients)
        self.made.append((what.round.step, int(gradient)))

    async def come(self, count: int) -> None:
        for step in range(count):
            await self.turns.come(order(step))

    async def give(self, step: int) -> None:
        await self.turns.give(order(step), [torch.tensor(float(step))])

    async def settle(self) -> list[int]:
        """Let everything happen that can; the steps whose updates are made, in order."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(step == whose for step, whose in self.made)
        return [step for step, _ in self.made]


@asynccontextmanager
async def device() -> AsyncIterator[Device]:
    made = Device()
    running = asyncio.create_task(made.turns.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_updates_are_made_in_order_whichever_device_is_first() -> None:
    async with device() as one:
        await one.turns.allow(None)
        await one.come(4)
        one.exchange.arrive(1)
        one.exchange.arrive(3)
        assert await one.settle() == []
        await one.give(0)
        assert await one.settle() == [0, 1]
        await one.give(2)
        assert await one.settle() == [0, 1, 2, 3]
        assert one.exchange.told == [0, 2], "others hear of this device's own, once"
        await one.turns.finished()


async def test_none_is_made_that_the_next_forward_must_not_see() -> None:
    async with device() as one:
        await one.turns.allow(1)
        await one.come(4)
        for number in (1, 3):
            one.exchange.arrive(number)
        for step in (0, 2):
            await one.give(step)
        assert await one.settle() == [0]
        await one.turns.allow(3)
        assert await one.settle() == [0, 1, 2]
        finished = asyncio.create_task(one.turns.finished())
        await one.settle()
        assert not finished.done()
        await one.turns.allow(None)
        await finished
        assert await one.settle() == [0, 1, 2, 3]


async def test_a_forward_waits_for_what_it_must_see() -> None:
    async with device() as one:
        await one.turns.allow(2)
        await one.come(2)
        sees = asyncio.create_task(one.turns.until(lambda: len(one.made) >= 2))
        await one.give(0)
        await one.settle()
        assert not sees.done()
        one.exchange.arrive(1)
        await sees


async def test_others_updates_are_made_while_this_device_has_nothing_to_do() -> None:
    """A small share holds up nobody: its next forward is far away."""
    async with device() as one:
        await one.turns.allow(30)
        for step in range(1, 20, 2):
            await one.turns.come(order(step))
            one.exchange.arrive(step)
        assert await one.settle() == list(range(1, 20, 2))
