"""Events to any number of readers, each with a bounded buffer of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from p2ptrain.observe.events import Event

BUFFERED_EVENTS = 10_000
"""A reader that lags further behind misses the oldest: training never waits for a reader."""


class EventStream:
    """Publish on one side, iterate on the others; all on one event loop."""

    def __init__(self) -> None:
        self._readers: set[_Reader] = set()
        self._closed = False

    def publish(self, event: Event) -> None:
        """Give the event to every reader."""
        for reader in self._readers:
            reader.put(event)

    def close(self) -> None:
        """End every iteration, once its buffer is empty."""
        self._closed = True
        for reader in self._readers:
            reader.close()

    def subscribe(self) -> AsyncGenerator[Event, None]:
        """An iterator of the events published from this call on."""
        reader = _Reader()
        self._readers.add(reader)
        if self._closed:
            reader.close()
        return self._read(reader)

    async def _read(self, reader: _Reader) -> AsyncGenerator[Event, None]:
        try:
            while (event := await reader.get()) is not None:
                yield event
        finally:
            self._readers.discard(reader)


class _Reader:
    """One bounded buffer."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=BUFFERED_EVENTS)
        self._more = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._more.set()

    def close(self) -> None:
        self._closed = True
        self._more.set()

    async def get(self) -> Event | None:
        while not self._events:
            if self._closed:
                return None
            self._more.clear()
            await self._more.wait()
        return self._events.popleft()
