"""What a process gives up before it computes for others: memory, files, network, other processes.

Where the system has seccomp (Linux on x86-64 and 64-bit Arm) it gives up all of these (`seccomp`).
Elsewhere limits of the process (`setrlimit`) must do: no new descriptor means no file and no
socket. A kernel that is short of memory ends it first. Windows has none of these.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from p2ptrain.process import seccomp

_STATUS = Path("/proc/self/status")

_FIRST_TO_END = Path("/proc/self/oom_score_adj")

_PR_SET_PDEATHSIG = 1


class Confinement(StrEnum):
    """What keeps a model's computation from doing anything else; texts are for users."""

    PROCESS = "own process"
    MEMORY = "memory limit"
    FILES = "no files, no network"
    CALLS = "system calls for computing alone (seccomp)"


def protections() -> Sequence[Confinement]:
    """Those that this system has."""
    found = [Confinement.PROCESS]
    if os.name == "posix":
        found += [Confinement.MEMORY] * (sys.platform == "linux") + [Confinement.FILES]
    if seccomp.is_there():
        found.append(Confinement.CALLS)
    return found


def confine(memory_bytes: int) -> None:
    """Of this process, for good. What is imported must be so by now.

    Args:
        memory_bytes: that it may take beside what it has.
    """
    if os.name != "posix":
        return
    import resource

    with contextlib.suppress(OSError):  # not Linux, or not to be written here
        _FIRST_TO_END.write_text("1000")
    taken = _data_bytes()
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)]
    if taken is not None:
        limits.append((resource.RLIMIT_DATA, taken + memory_bytes))
    limits.append((resource.RLIMIT_NOFILE, 0))
    for which, most in limits:
        resource.setrlimit(which, (most, most))
    seccomp.only_compute()


def end_with_parent() -> None:
    """The kernel ends this process with the one that started it, where it is Linux."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _data_bytes() -> int | None:
    """What counts against RLIMIT_DATA now; None where that is not known."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # not Linux
        return None
    rows = (line.partition(":") for line in lines)
    return next((int(row[2].split()[0]) << 10 for row in rows if row[0] == "VmData"), None)
