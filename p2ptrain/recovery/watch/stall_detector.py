"""When nothing has moved anywhere for so long that a round will never end.

Progress counts, not time: on a slow device one task takes minutes, on a slow link one tensor does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Bytes, Count, Seconds
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

QUIET_BYTES = 128 << 10
"""Membership alone moves less on a device's links meanwhile; a link of 64 kbit/s twice as much."""

QUESTION_BYTES = 1 << 10
"""To ask a device for its counters. The holder moves so many for each device."""


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

    def __init__(self, now: float, settings: RecoverySettings = HOME) -> None:
        self._settings = settings
        self._since = now
        self._before: Mapping[str, ProgressCounters] | None = None

    @property
    def due(self) -> float:
        """When to look next."""
        return self._since + self._settings.quiet_seconds

    def moved(self, now: float) -> None:
        """A stage has reported, or no report is due."""
        self._since, self._before = now, None

    def look(self, counters: Mapping[str, ProgressCounters], now: float) -> bool:
        """Whether nothing has moved since the look before."""
        before, self._before, self._since = self._before, counters, now
        if before is None:
            return False
        return not has_moved(before, counters, self._settings.quiet_seconds, self._settings)


def has_moved(
    before: Mapping[str, ProgressCounters],
    now: Mapping[str, ProgressCounters],
    seconds: float,
    settings: RecoverySettings = HOME,
) -> bool:
    """Whether anything has within so many seconds."""
    part, asked = seconds / settings.quiet_seconds, QUESTION_BYTES * len(now)

    def has(old: ProgressCounters | None, new: ProgressCounters) -> bool:
        return old is None or (
            new.tasks > old.tasks
            or new.link_bytes > old.link_bytes + part * QUIET_BYTES + asked
            or new.cpu_seconds > old.cpu_seconds + part * settings.quiet_cpu_seconds
        )

    return any(has(before.get(device), new) for device, new in now.items())
