"""Virtual time: a heap of events, executed one by one, hashed as they go.

Knows nothing of what it simulates. Same seed, same events, same hash, whatever PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from heapq import heappop, heappush
from struct import Struct
from typing import TypeAlias

EVENTS_PER_SECOND_LIMIT = 5_000
"""No healthy household comes near; messages that beget messages pass it at once."""

HASHED_TOGETHER = 1024
"""Events whose words are put into the hash at once."""

Action: TypeAlias = Callable[[], None]
_Scheduled: TypeAlias = tuple[float, int, bytes, Action]
"""Time, a number that no other has, label, action."""
_time = Struct("<d").pack


class EventStorm(Exception):
    """More events in a simulated second than there can be unless messages beget messages."""


class Kernel:
    """The event loop of the simulated world.

    Attributes:
        now: simulated seconds since the start.
        executed: events executed so far.
    """

    def __init__(self, events_per_second_limit: int = EVENTS_PER_SECOND_LIMIT) -> None:
        self.now = 0.0
        self._limit = events_per_second_limit
        self.executed = 0
        self._order = 0
        self._second = (0, 0)  # the present second, events executed when it began
        self._heap: list[_Scheduled] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._unhashed: list[bytes] = []

    def at(self, time: float, label: bytes, action: Action) -> None:
        """Execute `action` at `time` (now, where that has passed), after those due earlier.

        `label` says all that distinguishes the event; it enters the hash.
        """
        self._order += 1
        now = self.now
        heappush(self._heap, (time if time > now else now, self._order, label, action))

    def after(self, delay: float, label: bytes, action: Action) -> None:
        """Execute `action` `delay` seconds from now."""
        self.at(self.now + delay, label, action)

    def run_until(self, time: float) -> None:
        """Execute every event due by `time`, then set the clock to it.

        Raises:
            EventStorm: messages beget messages.
        """
        heap, unhashed = self._heap, self._unhashed
        while heap and heap[0][0] <= time:
            self.now, _, label, action = heappop(heap)
            self._count()
            unhashed += (_time(self.now), label, b"\n")
            action()
        self.now = time

    def _count(self) -> None:
        self.executed += 1
        second, before = self._second
        if int(self.now) != second:
            self._second = (int(self.now), self.executed)
        elif self.executed - before > self._limit:
            raise EventStorm(f"more than {self._limit} events at {self.now:.3f} s")
        if len(self._unhashed) >= 3 * HASHED_TOGETHER:
            self._take_in()

    def _take_in(self) -> None:
        self._hash.update(b"".join(self._unhashed))
        self._unhashed.clear()

    @property
    def event_hash(self) -> str:
        """Hash of all events executed so far, their times included."""
        self._take_in()
        return self._hash.hexdigest()
