"""What this device measures of itself: load of others, battery, temperature, memory, its person.

psutil knows most of it on every system; where there is no such sensor the reading is None.

When its person has used it last, as far as a program without rights can know: on Linux input on
terminals (their access time, which `w` shows too), interrupts of keyboards and touchpads, and
logind's idle hint, where a desktop keeps it; on macOS IOHIDSystem's idle time; on Windows
GetLastInputInfo. Where none of them is there, the load of other programs has to do.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
        idle_seconds: since the person used it last (`idle_seconds_reader`).
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


ASK_SECONDS = 2.0
"""For a program of the system."""

_INPUT = re.compile(r"i8042|i2c_hid|elan|syna|touchpad|keyboard", re.IGNORECASE)

_HINTS = ("IdleHint", "IdleSinceHintMonotonic")


def idle_seconds_reader() -> Callable[[], float | None]:
    """What says how long this device has not been used; call it some seconds apart."""
    if sys.platform == "darwin":
        return mac_idle_seconds
    if sys.platform == "win32":
        return windows_idle_seconds
    return LinuxIdle()


class LinuxIdle:
    """The latest of all signs of a person.

    Args:
        interrupts: the kernel's table of them.
        logind: its answer about all sessions; None: it is not here.
    """

    def __init__(
        self,
        interrupts: Path = Path("/proc/interrupts"),
        logind: Callable[[], str | None] | None = None,
    ) -> None:
        self._interrupts = interrupts
        self._logind = logind or _ask_logind
        self._counted: int | None = None
        self._counted_at = time.monotonic()

    def __call__(self) -> float | None:
        """None: no sign can be seen here."""
        found = [self._since_interrupt(), _since_terminal(), self._since_hint()]
        known = [seconds for seconds in found if seconds is not None]
        return max(min(known), 0.0) if known else None

    def _since_interrupt(self) -> float | None:
        try:
            count = input_interrupts(self._interrupts.read_text())
        except OSError:
            return None
        if count is None:
            return None
        if count != self._counted:
            is_first = self._counted is None
            self._counted, now = count, time.monotonic()
            self._counted_at = self._counted_at if is_first else now
        return time.monotonic() - self._counted_at

    def _since_hint(self) -> float | None:
        answer = self._logind()
        return None if answer is None else hinted_idle_seconds(answer, time.monotonic())


def input_interrupts(table: str) -> int | None:
    """How many keyboards and touchpads have raised; None where the table names none."""
    rows = [row.split() for row in table.splitlines() if _INPUT.search(row)]
    counts = [int(cell) for row in rows for cell in row[1:] if cell.isdigit()]
    return sum(counts) if rows else None


def hinted_idle_seconds(answer: str, now: float) -> float | None:
    """From `IdleHint=no` and `IdleSinceHintMonotonic=MICROSECONDS`, on the clock of `now`.

    A desktop that never says anything has no time either: then nothing is known.
    """
    said = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    hint, since = (said.get(name, "") for name in _HINTS)
    if not since.isdigit() or int(since) == 0:
        return None
    return now - int(since) / 1e6 if hint == "yes" else 0.0


def _ask_logind() -> str | None:
    program = shutil.which("loginctl")
    if program is None:
        return None
    return _said([program, "show-seat", "seat0", *(f"--property={name}" for name in _HINTS)])


def _since_terminal() -> float | None:
    """Since the last input on a terminal of a user who is logged in."""
    seconds = []
    for user in psutil.users():
        try:
            seconds.append(time.time() - Path("/dev", user.terminal or "").stat().st_atime)
        except OSError:  # a desktop's ":0"
            continue
    return min(seconds, default=None)


def mac_idle_seconds() -> float | None:
    """By IOHIDSystem."""
    answer = _said(["/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"])
    match = re.search(r'"HIDIdleTime"\s*=\s*([0-9]+)', answer or "")
    return None if match is None else int(match[1]) / 1e9


def windows_idle_seconds() -> float | None:
    """By the system's last input."""
    windll = getattr(ctypes, "windll", None)
    if windll is None:
        return None
    info = _LastInput(ctypes.sizeof(_LastInput), 0)
    if not windll.user32.GetLastInputInfo(ctypes.byref(info)):
        return None
    return float((windll.kernel32.GetTickCount() - info.milliseconds) % (1 << 32)) / 1000


class _LastInput(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("milliseconds", ctypes.c_uint)]


def _said(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("not_asked", program=command[0], why=str(error))
        return None
    return done.stdout if done.returncode == 0 else None
