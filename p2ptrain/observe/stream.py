"""Events to any number of readers, each with a bounded buffer of its own.

Readers are iterators rather than generators: a generator ends where a wait for its next event is
cancelled, and apps wait with a timeout. One that is not referenced any more gets nothing any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self
from weakref import WeakSet

from p2ptrain.observe.events import Event

BUFFERED_EVENTS = 10_000
"""A reader that lags further behind misses the oldest: training never waits for a reader."""


class EventStream:
    """Publish on one side, iterate on the others; all on one event loop."""

    def __init__(self) -> None:
        self._readers: WeakSet[EventReader] = WeakSet()
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

    def subscribe(self) -> EventReader:
        """An iterator of the events published from this call on."""
        reader = EventReader()
        self._readers.add(reader)
        if self._closed:
            reader.close()
        return reader


class EventReader:
    """One bounded buffer, as an async iterator; a wait that is cancelled loses no event."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=BUFFERED_EVENTS)
        self._more = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        """Take an event for the iterating reader; none once it is closed."""
        if not self._closed:
            self._events.append(event)
            self._more.set()

    def close(self) -> None:
        """End the iteration, once the buffer is empty."""
        self._closed = True
        self._more.set()

    async def aclose(self) -> None:
        """End the iteration now, as of an async generator (`contextlib.aclosing`)."""
        self._events.clear()
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self._events.popleft()
