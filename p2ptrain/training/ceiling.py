"""A job that has come to take more than was planned gives back what it does not use.

What is free in the C library's heap stays with the process, so that the next micro-batch finds it
(`allocator`), and with luck that is a third of a micro-batch beside what is in use. Without luck
each weight's gradient comes to lie at the heap's end, and within a round of four micro-batches a
stage of layers of 16 MiB has taken 100 MiB more than it needs:

    MiB                                               kernel ends the process
    left  ------------------------------------------- limit
      |                                 /|     /|
    a fifth, for others                / |    / |
    planned  ------------------------ /--|---/--|---
      |                     _ _/| __/    |__/   |__   what is free is given back
    in use            __/__/
                      round 1     2        3

So after a task the process is held against the plan, and where it has outgrown that, and less is
left than was to stay free for others, it gives back what is free. Where much is left it goes on.

What it gives back it takes again, page by page, in the next micro-batches: with a MobileNetV2 in
micro-batches of 94 a device that gave back whenever the fifth was touched had 1.3 million page
faults in ten rounds, and spent a sixth of its processor time on them. So where tasks never take
much at once, what is left for the next ones may be less than the fifth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

from p2ptrain.logs import get_logger
from p2ptrain.training.allocator import LEAST_CREEP_BYTES, trim_heap
from p2ptrain.training.budget import USABLE_SHARE, anonymous_bytes, available_memory_bytes

log = get_logger(__name__)

GROWTHS_LEFT = 1.5
"""How many times the most that came to a process between two looks it needs for the next task."""
LOOK_SECONDS = 0.01
"""Between two looks of 0.05 ms: tiles compute for less than a millisecond now and then."""


class Ceiling:
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
        self._most = max(self._most, kept + LEAST_CREEP_BYTES)
        log.info("outgrown", used_bytes=used, kept_bytes=kept)
