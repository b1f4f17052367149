"""Whether training waits for its data: what is read slower than it is trained with, is named.

Pure: seconds come in, the share of them that was lost comes out.
"""

from __future__ import annotations

import math

MIN_SECONDS, MIN_STEPS = 10.0, 5
"""Least that a share is of."""

MIN_SHARE = 0.2
"""Of the time that is worth a word."""

MOST_WORKERS = 16
"""Of a loader, that are advised."""


class DataWatch:
    """Of one generation."""

    def __init__(self) -> None:
        self._waited = self._seconds = self._busy = 0.0
        self._steps = 0

    def waited(self, seconds: float) -> None:
        """The next samples were not there for so long."""
        self._waited += seconds

    def stepped(self, seconds: float, busy_seconds: float) -> None:
        """A step took so long; the busiest device computed for `busy_seconds` of it."""
        self._steps += 1
        self._seconds += seconds
        self._busy += busy_seconds

    def share(self) -> float | None:
        """Of the time, in which nothing was computed since samples were missing; None = little.

        Waiting alone is no loss: samples are read ahead while earlier ones are computed.
        """
        if self._steps < MIN_STEPS or self._seconds < MIN_SECONDS:
            return None
        lost = min(self._waited, self._seconds - self._busy) / self._seconds
        return lost if lost >= MIN_SHARE else None

    def workers(self, now: int, share: float, processors: int) -> int:
        """Of a loader that has `now`, as many as read fast enough."""
        needed = math.ceil(max(now, 1) / max(1.0 - share, 0.05))
        return max(now, min(needed, MOST_WORKERS, max(processors, 2)))
