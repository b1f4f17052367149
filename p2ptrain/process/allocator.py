"""When memory that is free goes back to the system, and what lies beside the heap.

By default glibc returns large freed blocks and the end of its heap to the kernel at once, and gives
each thread a heap of its own that it unmaps when empty. Training frees the activations of every
micro-batch and takes them again for the next one, and would pay for each page again. So freed
memory is kept (`host_process`; docs/internals/memory.md).

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

docs/decisions/005-when-free-memory-is-given-back.md has the reasons. Only glibc is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from p2ptrain.logs import get_logger
from p2ptrain.process.host_process import MMAP_THRESHOLD_BYTES, glibc, take_apart
from p2ptrain.process.memory_budget import USABLE_SHARE, anonymous_bytes, available_memory_bytes

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
