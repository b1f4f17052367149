"""The updates of a stage whose devices take mini-batches in turn: all of them, in order, here too.

    coming   t, t+1, ...     gradients: this device's own, or another's over the exchange
    limit    no update beyond what this device's next forward sees: it would see too new weights

So an update waits for its gradients and for the forwards of this device that must not see it, and a
forward for the updates that it must see. Nothing else waits: whoever has a small share makes the
others' updates while it has nothing to compute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from p2ptrain.training.asynchronous.exchange import GradientExchange
from p2ptrain.training.protocol import PieceKey, RoundOrder

Gradients: TypeAlias = Sequence[Tensor | None]
Make: TypeAlias = Callable[[RoundOrder, Gradients], Awaitable[None]]
"""Makes the update of a mini-batch with its gradients, and tells of it."""


class Turns:
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


def _key(order: RoundOrder) -> PieceKey:
    return PieceKey(order.round.index, order.round.first)
