"""What a process gives up before it computes for others: memory, files, network, other processes.

Where the system has seccomp (Linux on x86-64 and 64-bit Arm) it gives up all of these. Elsewhere
limits of the process (`setrlimit`) must do: no new descriptor means no file and no socket. A kernel
that is short of memory ends it first. Windows has none of these.

With seccomp it may use memory, locks, clocks and threads of its own, and read and write what is
open already. Every call that is not listed fails with EPERM: torch asks for several of them, and
works without. A filter is a small program for the kernel's classic BPF machine that looks at each
call's number (seccomp(2), bpf(4)). It stays for the life of the process, and cannot be removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
    if has_seccomp():
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
    only_compute()


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


_ALLOWED: Mapping[str, tuple[int, int]] = {
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fstat": (5, 80),
    "futex": (202, 98),
    "get_robust_list": (274, 100),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "read": (0, 63),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "sigaltstack": (131, 132),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "write": (1, 64),
}
"""Numbers on x86-64 and on 64-bit Arm."""

_ERRNO, _ALLOW, _KILL_PROCESS = 0x00050000, 0x7FFF0000, 0x80000000

_LOAD, _IF_EQUAL, _IF_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06

_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data

_CLONE_THREAD = 0x00010000

_PR_SET_NO_NEW_PRIVS, _SET_MODE_FILTER = 38, 1

_STATUS_OF_SECCOMP = Path("/proc/sys/kernel/seccomp/actions_avail")

_SPECULATION_ALLOWED = 1 << 2
"""Kernels before 5.16 slow down a filtered process, and times would be those of no other."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between kinds of processors.

    Attributes:
        column: of the numbers above.
        audit: how the kernel calls it.
        clone, clone3, tgkill, seccomp: numbers of calls.
    """

    column: int
    audit: int
    clone: int
    clone3: int
    tgkill: int
    seccomp: int


_ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(0, 0xC000003E, 56, 435, 234, 317),
    "aarch64": Architecture(1, 0xC00000B7, 220, 435, 131, 277),
}


def architecture() -> Architecture | None:
    """This process's; None where no filter is known for it."""
    if sys.platform != "linux" or sys.maxsize <= 1 << 32:
        return None
    return _ARCHITECTURES.get(platform.machine())


def has_seccomp() -> bool:
    """Whether this kernel has filters, and one for this processor is known."""
    return architecture() is not None and _STATUS_OF_SECCOMP.exists()


def only_compute() -> bool:
    """Leave this thread, and those it starts, the calls above alone; whether the system does it."""
    kind = architecture()
    if kind is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    program = b"".join(_program(kind, os.getpid()))
    held = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a length in steps of eight bytes, and where they begin
    given = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    for flags in (_SPECULATION_ALLOWED, 0):
        if libc.syscall(kind.seccomp, _SET_MODE_FILTER, flags, given) == 0:
            return True
    return False


def _program(kind: Architecture, own_pid: int) -> Iterator[bytes]:
    """Instructions; jumps count those that are left out."""
    yield _step(_LOAD, _ARCHITECTURE_AT)
    yield _step(_IF_EQUAL, kind.audit, 1, 0)
    yield _step(_RETURN, _KILL_PROCESS)
    yield _step(_LOAD, _NUMBER_AT)
    for numbers in _ALLOWED.values():
        yield _step(_IF_EQUAL, numbers[kind.column], 0, 1)
        yield _step(_RETURN, _ALLOW)
    yield _step(_IF_EQUAL, kind.clone3, 0, 1)  # its flags lie in memory: glibc then takes clone
    yield _step(_RETURN, _ERRNO | errno.ENOSYS)
    yield _step(_IF_EQUAL, kind.clone, 0, 3)  # threads, no processes
    yield _step(_LOAD, _FIRST_ARGUMENT_AT)
    yield _step(_IF_BITS, _CLONE_THREAD, 0, 4)
    yield _step(_RETURN, _ALLOW)
    yield _step(_IF_EQUAL, kind.tgkill, 0, 2)  # abort() signals its own process
    yield _step(_LOAD, _FIRST_ARGUMENT_AT)
    yield _step(_IF_EQUAL, own_pid, 1, 0)
    yield _step(_RETURN, _ERRNO | errno.EPERM)
    yield _step(_RETURN, _ALLOW)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """struct sock_filter."""
    return struct.pack("HBBI", code, if_true, if_false, value)
