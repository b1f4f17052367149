"""What p2ptrain changes in the process that it runs in: all of it, and how to refuse it.

An app that trains is a guest's host: these settings belong to the whole process, and stay.

    mallopt                 memory that was freed stays with the process, in one heap: training
                            takes and frees the same memory in every micro-batch (glibc only)
    sys.setswitchinterval   threads take turns every 0.2 ms, not every 5 ms: a message waits for
                            the thread that computes

`leave_alone()`, or `p2ptrain.Node(changes_process=False)`, refuses both, for the rest of the
process; training is slower then and needs more memory than plans expect. `threads=` sets torch's
threads (`torch.set_num_threads`), and only that does. Nothing else is changed: not the garbage
collector, no signal handlers, no standard streams, no environment, no default of torch. (The
commands of `p2ptrain` are processes of their own and do more: `p2ptrain.api.loading`.)

Kept memory creeps: blocks lie a little elsewhere in each round, and every page touched once stays.
So the blocks of an update lie outside the heap (`beside_the_heap`), growth over rounds is given
back (`HeapCreep`), and so is what is free where a process outgrows its plan (`MemoryCeiling`):

    MiB                                               kernel ends the process
    left  ------------------------------------------- limit
      |                                 /|     /|
    a fifth, for others                / |    / |
    planned  ------------------------ /--|---/--|---
      |                     _ _/| __/    |__/   |__   what is free is given back
    in use            __/__/

docs/internals/memory.md and docs/decisions/005-when-free-memory-is-given-back.md have the reasons.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from p2ptrain.logs import get_logger
from p2ptrain.process.memory_budget import USABLE_SHARE, anonymous_bytes, available_memory_bytes

SWITCH_SECONDS = 0.0002
"""For how long another thread keeps the interpreter that this one waits for; of the process."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h

_M_MXFAST = 1

TRIM_THRESHOLD_BYTES = (1 << 31) - 1
"""mallopt's largest. Lowering it gives memory back between micro-batches, to be taken again."""

MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's largest in all its versions. Blocks beyond it come from the kernel each time: raising it
would keep holes where they once lay."""


class _Permission:
    def __init__(self) -> None:
        self.is_given = True  # until an app says otherwise


_permission = _Permission()


def leave_alone() -> None:
    """Change nothing from now on in this process; what was changed before stays."""
    _permission.is_given = False


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process, until `trim_heap` gives it back.

    All threads that have no heap yet share one from then on, so call it before any is started: an
    ended thread's heap goes to the next one.

    Returns:
        Whether the C library has these settings, and they may be changed.
    """
    library = glibc()
    if library is None or not _permission.is_given:
        return False
    wanted = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_MXFAST, 0),
    )
    taken = [library.mallopt(option, value) == 1 for option, value in wanted]
    return all(taken)


def take_apart(least_bytes: int) -> bool:
    """Blocks of so many bytes and more come from the kernel, each alone; whether that may be."""
    library = glibc()
    if library is None or not _permission.is_given:
        return False
    library.mallopt(_M_MMAP_THRESHOLD, least_bytes)
    return True


def switch_often() -> None:
    """Threads take turns more often than they would."""
    if _permission.is_given:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


def use_threads(count: int) -> None:
    """torch's threads, for all of the process; the user asked for that."""
    importlib.import_module("torch").set_num_threads(count)  # planners need neither


def glibc() -> ctypes.CDLL | None:
    """None where the process runs on another C library."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


APART_BYTES = 4 << 20
"""Of a block that is not to lie in the heap. A smaller one leaves no hole worth a page's price."""

MIN_CREEP_BYTES = 12 << 20

CREEP_PARTS = 10
"""A growth of one such part of the process is given back, and none below MIN_CREEP_BYTES: pages
that the next round needs after all must be taken again, which slows the round of all devices."""

LEARNING_ROUNDS = 8
"""Rounds whose memory at their end counts as needed. A device that is a little late finds more
waiting than in the round before, so one round is too few to learn from."""


@contextmanager
def beside_the_heap() -> Iterator[None]:
    """What is taken meanwhile in blocks of APART_BYTES and more comes from the kernel, each alone.

    For what stays, and for what an update needs for a moment: among the blocks of rounds both would
    leave holes that no block of the same size fits into. Other threads' blocks go there too.
    """
    if not take_apart(APART_BYTES):
        yield
        return
    try:
        yield
    finally:
        take_apart(MMAP_THRESHOLD_BYTES)


def trim_heap() -> None:
    """Give memory back that the C library keeps for later, so that it counts as available."""
    library = glibc()
    if library is not None:
        library.malloc_trim(0)


class HeapCreep:
    """Gives back what rounds have freed, once that has become much more than they need."""

    def __init__(
        self,
        used_bytes: Callable[[], int] = anonymous_bytes,
        give_back: Callable[[], None] = trim_heap,
    ) -> None:
        """Tests bring their own; by default it is this process's heap."""
        self._used_bytes = used_bytes
        self._give_back = give_back
        self._most = 0  # that a round has ended with while it was learnt
        self._left = LEARNING_ROUNDS  # rounds that it is learnt from

    def round_ended(self) -> None:
        """Look, when least is in use: what the first rounds end with, and those after a trim, is
        needed."""
        used = self._used_bytes()
        if self._left:
            self._most = max(self._most, used)
            self._left -= 1
        elif used - self._most > max(MIN_CREEP_BYTES, self._most // CREEP_PARTS):
            self._give_back()
            self._most, self._left = 0, LEARNING_ROUNDS


log = get_logger(__name__)

GROWTHS_LEFT = 1.5
"""How many times the most that came to a process between two looks it needs for the next task."""

LOOK_SECONDS = 0.01
"""Between two looks of 0.05 ms: tiles compute for less than a millisecond now and then."""


class MemoryCeiling:
    """Of one process, looked at by the thread that computes."""

    def __init__(
        self,
        used_bytes: Callable[[], int] = anonymous_bytes,
        left_bytes: Callable[[], int] = available_memory_bytes,
        give_back: Callable[[], None] = trim_heap,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Tests bring their own; by default it is this process, and the device around it."""
        self._used_bytes = used_bytes
        self._left_bytes = left_bytes
        self._give_back = give_back
        self._now = now
        self._most: float = math.inf
        self._to_be_left = 0.0
        self._next_look = -math.inf
        self._seen: int | None = None  # in use, by the last look
        self._growth = 0  # the most that came to it between two looks

    def plan(self, job_bytes: int, beside_bytes: int) -> None:
        """From now on a job takes `job_bytes`, and this process `beside_bytes` without it."""
        self._most = job_bytes + beside_bytes
        self._to_be_left = job_bytes * (1 / USABLE_SHARE - 1)

    def look(self) -> None:
        """A task has ended."""
        now = self._now()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        used = self._used_bytes()
        if self._seen is not None:
            self._growth = max(self._growth, used - self._seen)
        self._seen = used
        needed = min(self._to_be_left, GROWTHS_LEFT * self._growth)
        if used <= self._most or self._left_bytes() >= needed:
            return
        self._give_back()
        self._seen = kept = self._used_bytes()
        # What it cannot give back is in use: only what comes to it is worth another look.
        self._most = max(self._most, kept + MIN_CREEP_BYTES)
        log.info("outgrown", used_bytes=used, kept_bytes=kept)
