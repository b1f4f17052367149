"""What devices spend while a figure is measured: processor time, bytes sent, memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from tools.testbed import EmulatedDevice

SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of all devices at one moment."""

    seconds: float
    cpu_seconds: dict[str, float]
    sent_bytes: dict[str, int]

    @classmethod
    def now(cls, devices: Sequence[EmulatedDevice]) -> Reading:
        """Read them."""
        return cls(
            seconds=perf_counter(),
            cpu_seconds={device.name: device.cpu_seconds() for device in devices},
            sent_bytes={device.name: device.sent_bytes() for device in devices},
        )

    def until(self, end: Reading) -> dict[str, Any]:
        """What was spent from this moment to `end`."""
        return {
            "wall_seconds": end.seconds - self.seconds,
            "cpu_seconds": {
                name: spent - self.cpu_seconds[name] for name, spent in end.cpu_seconds.items()
            },
            "sent_bytes": {
                name: sent - self.sent_bytes[name] for name, sent in end.sent_bytes.items()
            },
        }


class MemoryWatch:
    """The most anonymous memory of each device, looked at twice a second, in a context."""

    def __init__(self, devices: Sequence[EmulatedDevice]) -> None:
        self._devices = devices
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = {device.name: 0 for device in devices}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            for device in self._devices:
                now = device.anonymous_bytes_now()
                self.peak_bytes[device.name] = max(self.peak_bytes[device.name], now)
