"""Measures this device's share of a core, from spans of uninterrupted computing.

A quota comes in slices of up to a tenth of a second, so a short span may hit a slice or a pause:
spans are joined until they are well longer. Disturbances of some spans, such as another program
that starts, do not count, because the median is taken.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WINDOW_SECONDS = 0.3
"""Wall time put together; longer ones are fewer, and so less robust."""

_COARSE_SECONDS = 0.002

_LOOKS = 1000  # of less than a microsecond each; a fine clock differs at the first


@functools.cache
def thread_clock() -> Callable[[], float]:
    """Seconds of processor time that the calling thread has used.

    Where that clock stands still for longer than units take (Windows counts in steps of 15.6 ms),
    the world's time instead: the device then counts as having its core to itself.
    """
    used = now = time.thread_time()
    for _ in range(_LOOKS):
        if (now := time.thread_time()) != used:
            break
    return time.thread_time if 0 < now - used < _COARSE_SECONDS else time.perf_counter


@dataclass(frozen=True, slots=True)
class CpuSpan:
    """Seconds of uninterrupted computing: `wall` of the world, `cpu` of the thread."""

    wall: float
    cpu: float

    @property
    def ratio(self) -> float:
        """Wall by CPU time, at least 1."""
        return max(1.0, self.wall / self.cpu) if self.cpu > 0 else 1.0

    def __add__(self, other: CpuSpan) -> CpuSpan:
        return CpuSpan(self.wall + other.wall, self.cpu + other.cpu)


def wall_by_cpu(spans: Sequence[CpuSpan]) -> float:
    """How many seconds one of CPU time takes: the median over windows, by their CPU time."""
    windows = sorted(_windows(spans), key=lambda window: window.ratio)
    half = sum(window.cpu for window in windows) / 2
    passed = 0.0
    for window in windows:
        passed += window.cpu
        if passed >= half:
            return window.ratio
    return 1.0


def _windows(spans: Iterable[CpuSpan]) -> list[CpuSpan]:
    """Neighbours put together; what is left at the end goes to the last."""
    windows: list[CpuSpan] = []
    for span in spans:
        if windows and windows[-1].wall < WINDOW_SECONDS:
            span = windows.pop() + span
        windows.append(span)
    if len(windows) > 1 and windows[-1].wall < WINDOW_SECONDS:
        rest = windows.pop()
        windows[-1] += rest
    return windows
