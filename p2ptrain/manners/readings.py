"""What this device measures of itself: load of others, battery, temperature, memory, its person.

psutil knows most of it on every system; where there is no such sensor the reading is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

import psutil

from p2ptrain.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Of one moment; None: not to be known here.

    Attributes:
        others_cpu: part of all cores that programs other than this one use, 0 to 1.
        on_battery: it draws on its battery.
        battery: how full that is, 0 to 1.
        available_bytes: memory that programs could still take.
        idle_seconds: since the device's person has used it last.
    """

    others_cpu: float | None = None
    on_battery: bool | None = None
    battery: float | None = None
    temperature_c: float | None = None
    available_bytes: int | None = None
    idle_seconds: float | None = None


ReadDevice: TypeAlias = Callable[[], DeviceReading]
"""Takes some milliseconds, and is called in a thread."""


def idle_unknown() -> float | None:
    """It is not known when the device was used last."""
    return None


class DeviceReader:
    """Reads this machine; call it with some time between.

    Args:
        idle_seconds: since the person used it last (`person.py`).
        children_seconds: which processes this one has started is looked up again after so long: it
            takes a look at every process of the machine.
    """

    def __init__(
        self,
        idle_seconds: Callable[[], float | None] = idle_unknown,
        children_seconds: float = 30.0,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._children_seconds = children_seconds
        self._children: list[psutil.Process] = []
        self._children_at = float("-inf")
        self._process = psutil.Process()
        self._cpu: tuple[float, float, float] | None = None  # all, idle, ours: seconds

    def __call__(self) -> DeviceReading:
        battery = _battery()
        return DeviceReading(
            others_cpu=self._others_cpu(),
            on_battery=None if battery is None else not battery[1],
            battery=None if battery is None else battery[0],
            temperature_c=_temperature(),
            available_bytes=int(psutil.virtual_memory().available),
            idle_seconds=self._idle_seconds(),
        )

    def _others_cpu(self) -> float | None:
        """Since the last call; None at the first."""
        times = psutil.cpu_times()
        # Linux counts guests' time in the users' too
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        before, now = self._cpu, (whole, idle, self._own_seconds())
        self._cpu = now
        if before is None or now[0] <= before[0]:
            return None
        passed, rested, ours = (new - old for new, old in zip(now, before, strict=True))
        return min(max((passed - rested - max(ours, 0.0)) / passed, 0.0), 1.0)

    def _own_seconds(self) -> float:
        """Of this process and those that it has started."""
        found, now = 0.0, monotonic()
        if now - self._children_at >= self._children_seconds:
            self._children, self._children_at = _children(self._process), now
        for process in (self._process, *self._children):
            try:
                times = process.cpu_times()
            except psutil.Error:  # it has ended
                continue
            found += times.user + times.system
        ended = os.times()
        return found + ended.children_user + ended.children_system


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except (psutil.Error, OSError) as error:  # some containers show no processes
        log.debug("children_not_seen", why=str(error))
        return []


def _battery() -> tuple[float, bool] | None:
    """How full it is, and whether the device is plugged in."""
    try:
        found = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError) as error:  # as its driver pleases
        log.debug("battery_not_read", why=str(error))
        return None
    if found is None:
        return None
    return min(max(found.percent / 100, 0.0), 1.0), found.power_plugged is not False


def _temperature() -> float | None:
    """Of the hottest sensor in degrees Celsius; Linux and FreeBSD know it."""
    read = getattr(psutil, "sensors_temperatures", None)
    if read is None:
        return None
    try:
        found = [float(one.current) for of in read().values() for one in of]
    except (OSError, RuntimeError, ValueError) as error:
        log.debug("temperature_not_read", why=str(error))
        return None
    sensible = [one for one in found if 0 < one < 150]  # some report 0 or 65261 where they fail
    return max(sensible, default=None)
