"""By how much another device's clock is ahead of this one's, from round trips (as NTP, RFC 5905).

    asked -----> theirs        offset = theirs - (asked + answered) / 2
    answered <--               wrong by (answered - asked) / 2 at most, where one way takes longer

Clocks drift apart, some 50 us a second at worst: so the best answer of each window counts, and
between two windows the offset is interpolated. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

WINDOW_SECONDS = 20.0

MOST_WINDOWS = 1024
"""When there are more, every second one goes."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """One answer: at `theirs` their clock was so far ahead, give or take `error_seconds`."""

    theirs: float
    seconds: float
    error_seconds: float


class ClockOffsets:
    """Of one device. Times of both clocks are in seconds."""

    def __init__(self) -> None:
        self._windows: list[ClockOffset] = []  # the best of each
        self._window_began = 0.0

    def add(self, asked: float, theirs: float, answered: float) -> None:
        """A round trip, in the order in which they are made."""
        heard = ClockOffset(theirs, theirs - (asked + answered) / 2, (answered - asked) / 2)
        if not self._windows or theirs - self._window_began >= WINDOW_SECONDS:
            self._window_began = theirs
            self._windows.append(heard)
            if len(self._windows) > MOST_WINDOWS:
                self._windows = self._windows[::2]
        elif heard.error_seconds < self._windows[-1].error_seconds:
            self._windows[-1] = heard

    @property
    def error_seconds(self) -> float | None:
        """By which an aligned time may be wrong at most; None where nothing was heard."""
        return max((one.error_seconds for one in self._windows), default=None)

    @property
    def newest(self) -> ClockOffset | None:
        """Of the last window."""
        return self._windows[-1] if self._windows else None

    def aligned(self, theirs: float) -> float:
        """That time of their clock by this device's.

        Raises:
            ValueError: nothing was heard of it.
        """
        if not self._windows:
            raise ValueError("no round trip to that device was made")
        after = bisect_right(self._windows, theirs, key=lambda one: one.theirs)
        if after in (0, len(self._windows)):
            return theirs - self._windows[max(after - 1, 0)].seconds
        first, then = self._windows[after - 1], self._windows[after]
        share = (theirs - first.theirs) / (then.theirs - first.theirs)
        return theirs - (first.seconds + share * (then.seconds - first.seconds))
