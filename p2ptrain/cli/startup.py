"""What happens before a command loads: signals, standard files, waiting threads, the heap.

Ctrl-C and SIGTERM are kept until the command can act on them. Loading takes a second or more on a
small device, and Python would end it with a traceback from the middle of an import, or silently.

stdin, stdout and stderr are opened where the parent process has closed them. Otherwise the next
socket becomes file descriptor 1, into which `--json` or a C library would then write.

A command that computes restarts itself with glibc's thread caches off, which glibc reads once, when
a process starts. Torch wants blocks on 64-byte borders. glibc cuts each out of a larger one, and
the small pieces that remain at its ends go to the thread's cache, where they do not merge with
free blocks beside them:

    | 4 MiB, free |piece, an autograd node's| 4 MiB, free |piece, cached| 4 MiB in use |

So no free block fits the next 4 MiB (docs/decisions/004-a-heap-without-caches.md). The rest of the
allocator is set by `process/host_process.py`.

Torch's threads wait for each other asleep (`let_threads_sleep`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

_kept: list[int] = []


def keep_signals() -> None:
    """From now on only note the signals, those that are not ignored anyway."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:
            _before[number] = handler
            signal.signal(number, lambda received, _frame: _kept.append(received))


def release_signals() -> bool:
    """Handle signals as before `keep_signals`; whether one came meanwhile. Harmless when
    repeated."""
    for number, handler in _before.items():
        signal.signal(number, handler)
    came = bool(_kept)
    _before.clear()
    _kept.clear()
    return came


def complete_standard_streams() -> None:
    """Let the closed ones lead nowhere."""
    for number in (0, 1, 2):  # a new descriptor is the lowest that is free
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


COMMANDS = frozenset({"join", "train", "profile"})
"""Those that compute."""

VARIABLE = "GLIBC_TUNABLES"

CACHE = "glibc.malloc.tcache_count"

SETTING = f"{CACHE}=0"

Execute = Callable[[str, list[str], Mapping[str, str]], object]


def ensure_merging_heap(
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    execute: Execute = os.execve,
    *,
    is_glibc: bool | None = None,
) -> None:
    """Start this process again, as the same process, where its heap would keep holes.

    Nothing happens where the environment says already how many blocks are cached, or the C library
    is another one; nor to a program that has made up `command` itself, or was read from stdin: it
    would not do the same again.

    Args:
        command: what follows the program's name.
    """
    if not COMMANDS.intersection(command[:1]) or not is_whole_process(command):
        return
    tunables = environment.get(VARIABLE, "")
    if CACHE in tunables or not (_is_glibc() if is_glibc is None else is_glibc):
        return
    changed = {**environment, VARIABLE: f"{tunables}:{SETTING}".lstrip(":")}
    with contextlib.suppress(OSError):  # then it stays as it is: with more holes
        execute(sys.executable, [sys.executable, *sys.orig_argv[1:]], changed)


SPINS = "GOMP_SPINCOUNT"

_SPINS = "1000"
"""Some 10 us, in which a thread that is computing ends; OpenMP's own count is 300,000."""

_WAITING = (SPINS, "OMP_WAIT_POLICY")


def let_threads_sleep(
    command: Sequence[str], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Have torch's threads spin only briefly; call it before torch is loaded, which reads it once.

    By itself OpenMP has them spin for 3 ms before they sleep. Where other programs compute too,
    that takes the core from the thread that they wait for: a ResNet-101's first batches took four
    times as many processor seconds. Nothing happens where the environment already says how they
    wait.

    Args:
        command: what follows the program's name.
    """
    if COMMANDS.intersection(command[:1]) and not any(name in environment for name in _WAITING):
        environment[SPINS] = _SPINS


def is_whole_process(command: Sequence[str]) -> bool:
    """Whether this process does nothing but `command`, and could be started again."""
    given = sys.orig_argv[-len(command) :] == [*command]
    return given and bool(sys.executable) and sys.argv[0] not in ("", "-")


def _is_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    return name in getattr(os, "confstr_names", {}) and bool(os.confstr(name))
