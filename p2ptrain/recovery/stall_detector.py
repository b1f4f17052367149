"""When nothing has moved anywhere for so long that a round will never end.

Progress counts, not time: on a slow device one task takes minutes, on a slow link one tensor does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Bytes, Count, Seconds

QUIET_SECONDS = 30.0
"""Without a word from any stage, before the devices are asked, and between two such looks."""

QUIET_BYTES = 128 << 10
"""Membership alone moves less on a device's links meanwhile; a link of 64 kbit/s twice as much."""

QUESTION_BYTES = 1 << 10
"""To ask a device for its counters. The holder moves so many for each device."""

QUIET_CPU_SECONDS = 3.0
"""A process that only waits takes less of them meanwhile."""


@dataclass(frozen=True, slots=True)
class ProgressCounters(FrameFields):
    """What a device has done; each only rises.

    Attributes:
        tasks: that its compute thread has finished.
        link_bytes: over all its links, both ways.
        cpu_seconds: of its process.
    """

    tasks: Count
    link_bytes: Bytes
    cpu_seconds: Seconds


class StallDetector:
    """See the module. Pure: times are seconds of any monotonic clock.

    Args:
        now: when the generation began.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._before: Mapping[str, ProgressCounters | None] | None = None

    @property
    def due(self) -> float:
        """When to look next."""
        return self._since + QUIET_SECONDS

    def moved(self, now: float) -> None:
        """A stage has reported, or no report is due."""
        self._since, self._before = now, None

    @staticmethod
    def has_moved(
        before: Mapping[str, ProgressCounters], now: Mapping[str, ProgressCounters], seconds: float
    ) -> bool:
        """Whether anything has within so many seconds."""
        part = seconds / QUIET_SECONDS
        asked = QUESTION_BYTES * len(now)
        return any(d not in before or _has_moved(before[d], now[d], part, asked) for d in now)

    def look(self, counters: Mapping[str, ProgressCounters | None], now: float) -> bool:
        """Whether nothing has moved since the look before; who does not answer (None) has not."""
        before, self._before, self._since = self._before, counters, now
        if before is None:
            return False
        asked = QUESTION_BYTES * len(counters)
        return not any(_has_moved(before.get(d), counters[d], 1.0, asked) for d in counters)


def _has_moved(
    old: ProgressCounters | None, new: ProgressCounters | None, part: float, asked: int
) -> bool:
    if new is None:
        return False
    return old is None or (
        new.tasks > old.tasks
        or new.link_bytes > old.link_bytes + part * QUIET_BYTES + asked
        or new.cpu_seconds > old.cpu_seconds + part * QUIET_CPU_SECONDS
    )
