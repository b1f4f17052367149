"""When a device's person has used it last, as far as a program without rights can know.

Linux: input on terminals (their access time, which `w` shows too), interrupts of keyboards and
touchpads, and logind's idle hint, where a desktop keeps it. macOS: IOHIDSystem's idle time.
Windows: GetLastInputInfo. Where none of them is there, the load of other programs has to do.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from p2ptrain.logs import get_logger

log = get_logger(__name__)

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
