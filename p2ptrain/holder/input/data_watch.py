"""Whether training waits for its data: what is read slower than it is trained with, is named.

Pure: seconds come in, the share of them that was lost comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataWatchConfig:
    """When it is said.

    Attributes:
        seconds, steps: least that a share is of.
        share: least share of the time that is worth a word.
        most_workers: of a loader, that are advised.
    """

    seconds: float = 10.0
    steps: int = 5
    share: float = 0.2
    most_workers: int = 16


class DataWatch:
    """Of one generation."""

    def __init__(self, config: DataWatchConfig | None = None) -> None:
        self._config = config or DataWatchConfig()
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
        config = self._config
        if self._steps < config.steps or self._seconds < config.seconds:
            return None
        lost = min(self._waited, self._seconds - self._busy) / self._seconds
        return lost if lost >= config.share else None

    def workers(self, now: int, share: float, processors: int) -> int:
        """Of a loader that has `now`, as many as read fast enough."""
        needed = math.ceil(max(now, 1) / max(1.0 - share, 0.05))
        return max(now, min(needed, self._config.most_workers, max(processors, 2)))
