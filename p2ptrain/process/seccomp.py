"""The system calls that a process which only computes may use, enforced by Linux's seccomp filters.

It may use memory, locks, clocks and threads of its own, and read and write what is open already.
It opens no file and no socket; it starts, signals and inspects no other process. Every call that is
not listed fails with EPERM: torch asks for several of them, and works without.

A filter is a small program for the kernel's classic BPF machine that looks at each call's number
(seccomp(2), bpf(4)). It stays for the life of the process, and cannot be removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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


def is_there() -> bool:
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
