"""Errors of the user's own functions, in one line that names the place; and what they do now.

A read of a network drive that hangs raises nothing and returns nothing, so a slow call is
reported.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

RAISED = (Exception, asyncio.CancelledError, SystemExit, GeneratorExit)
"""What the user's functions may raise and is reported: anything but an interrupt. To an event loop
some
of these say something: that a task was cancelled, so that others wait for it without an end."""


def describe_user_error(error: BaseException) -> str:
    """Class, message and the user's own line, where the traceback has one."""
    from p2ptrain.model.capture.export_errors import user_place  # here: it loads torch

    place = user_place(error)
    return f"{type(error).__name__}: {error}" + (f" (at {place})" if place else "")


READING = "reading"
"""What calls of the user's data begin with."""

FIRST_SECONDS = 8.0
"""Before it is said for the first time; then each time after three times as long as before."""

LOOK_SECONDS = 1.0

LONGER = 3.0


@dataclass(slots=True)
class _Doing:
    what: str
    values: tuple[Any, ...]
    since: float
    due: float


class Doings:
    """Calls of the user's code that are under way. Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        first_seconds: float = FIRST_SECONDS,
        longer: float = LONGER,
    ) -> None:
        self._clock, self._first_seconds, self._longer = clock, first_seconds, longer
        self._lock = threading.Lock()
        self._now: dict[int, _Doing] = {}
        self._next = 0

    @contextmanager
    def doing(self, what: str, *values: Any) -> Iterator[None]:
        """While the block runs: `what`, with `values` in its places, such as "sample {}"."""
        now = self._clock()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._now[number] = _Doing(what, values, now, now + self._first_seconds)
        try:
            yield
        finally:
            with self._lock:
                del self._now[number]

    def long(self) -> list[tuple[str, float]]:
        """What has taken long and is due to be said, with its seconds."""
        now, said = self._clock(), list[tuple[str, float]]()
        with self._lock:
            for doing in self._now.values():
                if now >= doing.due:
                    seconds = now - doing.since
                    doing.due = doing.since + self._longer * seconds
                    said.append((doing.what.format(*doing.values), seconds))
        return said

    def longest(self, least_seconds: float) -> str | None:
        """What has taken longest, where that is so many seconds, with these."""
        now = self._clock()
        with self._lock:
            first = min(self._now.values(), key=lambda doing: doing.since, default=None)
        if first is None or now - first.since < least_seconds:
            return None
        return f"{first.what.format(*first.values)}, for {now - first.since:.0f} s"

    async def say(self, warn: Callable[[str], None]) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for what, seconds in self.long():
                warn(f"{what} has taken {seconds:.0f} s and continues")


doings = Doings()
"""Of this process."""
