"""Things that arrive in any order, taken in the order the schedule wants them."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from p2ptrain.errors import ProtocolError

K = TypeVar("K")

V = TypeVar("V")


class Mailbox(Generic[K, V]):
    """A bounded keyed inbox with one reader a key.

    Attributes:
        capacity: most items held; an honest sender never exceeds it (its schedule or its credits
            bound what it sends), so one more is a protocol error.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self.capacity = capacity
        self._items: dict[K, V] = {}
        self._waiting: dict[K, asyncio.Future[V]] = {}
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def put(self, key: K, item: V) -> None:
        """Deliver `item`.

        Raises:
            ProtocolError: the key is already here, or the box is full.
        """
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(item)
            return
        if key in self._items:
            raise ProtocolError(f"{self._name} {key} arrived twice")
        if len(self._items) >= self.capacity:
            raise ProtocolError(f"{self._name}: more than {self.capacity} arrived unasked")
        self._items[key] = item

    @property
    def has_failed(self) -> bool:
        """Whether what is not here will not come."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """Nothing more comes: present and later waits for what is not here raise `error`."""
        self._error = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def take(self, key: K) -> V:
        """Wait for `key` and remove it. Raises what `fail` was given."""
        if key in self._items:
            return self._items.pop(key)
        if self._error is not None:
            raise self._error
        waiting: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        try:
            return await waiting
        finally:
            self._waiting.pop(key, None)
