"""Events to any number of readers, each with a bounded buffer of its own.

Readers are iterators rather than generators: a generator ends where a wait for its next event is
cancelled, and apps wait with a timeout. A reader that is not referenced any more gets no events.

An app's `on_event` is checked before anything runs, and watched during each call. It runs on the
event loop, so while it does not return this device's network stands still and no event can say so.
A thread warns of it, as Python warns: on stderr.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Self
from weakref import WeakSet

from p2ptrain.events import Event
from p2ptrain.job.callbacks import check_takes_event
from p2ptrain.job.user_code import Doings

BUFFERED_EVENTS = 10_000
"""A reader that lags further behind misses the oldest: training never waits for a reader."""


class EventStream:
    """Publish on one side, iterate on the others; all on one event loop.

    Args:
        replays: whether a reader gets the events too that were published before it came.
    """

    def __init__(self, *, replays: bool = False) -> None:
        self._readers: WeakSet[EventReader] = WeakSet()
        self._closed = False
        self._earlier: deque[Event] = deque(maxlen=BUFFERED_EVENTS if replays else 0)

    def publish(self, event: Event) -> None:
        """Give the event to every reader."""
        self._earlier.append(event)
        for reader in self._readers:
            reader.put(event)

    def close(self) -> None:
        """End every iteration, once its buffer is empty."""
        self._closed = True
        for reader in self._readers:
            reader.close()

    def subscribe(self) -> EventReader:
        """An iterator of the events published from this call on; or of all, where it replays."""
        reader = EventReader()
        for event in self._earlier:
            reader.put(event)
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


def _warn(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=1)


def check_on_event(on_event: object) -> None:
    """OptionError where it cannot be called with one event, or has to be awaited."""
    if on_event is not None:
        check_takes_event("on_event", on_event)


class CallWatch:
    """Warns of calls that do not return.

    Args:
        look_seconds: between looks of its thread, which begins with the first call.
        long_seconds: a call is said after that: members silent for longer are taken for dead.
    """

    def __init__(
        self,
        look_seconds: float = 1.0,
        long_seconds: float = 5.0,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        self._look_seconds, self._warn = look_seconds, warn
        self._calls = Doings(first_seconds=long_seconds, longer=inf)  # once each
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, on_event: Callable[[Event], object], event: Event) -> None:
        """Call it with an event."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # as in a forked process
                self._thread = threading.Thread(target=self._look, name="on_event", daemon=True)
                self._thread.start()
        with self._calls.doing("on_event, at the event {!r},", event.event):
            on_event(event)

    def _look(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self._look_seconds)
            for what, seconds in self._calls.long():
                self._warn(
                    f"{what} has not returned for {seconds:.0f} s: everything on this device waits "
                    "for it. Do long work in a thread"
                )


call_watch = CallWatch()
"""Of this process."""
