"""A process that has outgrown its plan gives back what is free, where that will be missed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.host_process import LOOK_SECONDS, MemoryCeiling

MIB = 1 << 20


@dataclass
class Process:
    """In MiB: what is in use, what lies free beside it, and what the device has for others."""

    in_use: int = 400
    free: int = 0
    left: int = 400
    given_back: list[int] = field(default_factory=list)
    looks: int = 0
    now: float = 0.0

    def takes(self, mib: int) -> None:
        """Beside what is free: no freed block fits."""
        self.free += mib
        self.left -= mib

    def needs(self, mib: int) -> None:
        """It stays in use."""
        self.in_use += mib
        self.left -= mib

    def used_bytes(self) -> int:
        self.looks += 1
        return (self.in_use + self.free) * MIB

    def left_bytes(self) -> int:
        return self.left * MIB

    def give_back(self) -> None:
        self.given_back.append(self.free)
        self.left += self.free
        self.free = 0

    def time(self) -> float:
        self.now += LOOK_SECONDS
        return self.now

    def ceiling(self, *, planned: int | None) -> MemoryCeiling:
        made = MemoryCeiling(self.used_bytes, self.left_bytes, self.give_back, self.time)
        if planned is not None:
            made.plan(planned * MIB, self.in_use * MIB)
        return made


def test_what_lies_free_is_given_back_when_the_plan_is_outgrown_and_little_is_left() -> None:
    process = Process()
    ceiling = process.ceiling(planned=320)
    ceiling.look()
    process.needs(240)  # by one task: the next one may take as much
    for _ in range(12):
        process.takes(16)
        ceiling.look()
        assert process.left > 48, "it is told before the kernel has to"
    # 320 are planned: 80 more are to stay free, and with 96 free there are only 64.
    assert process.given_back == [96, 96]


def test_where_tasks_take_little_at_once_it_goes_on_until_that_would_be_missed() -> None:
    process = Process()
    ceiling = process.ceiling(planned=320)
    process.needs(240)
    for _ in range(19):
        process.takes(16)
        ceiling.look()
    # Half as much again as the 16 of a task, instead of the 80 that were to stay free.
    assert process.given_back == [144, 144]


def test_what_was_given_back_and_taken_again_counts_as_growth() -> None:
    process = Process()
    ceiling = process.ceiling(planned=320)
    process.needs(240)
    for taken in (16, 16, 16, 90, 16):
        process.takes(taken)
        ceiling.look()
    assert process.given_back == [138], "a task has taken 90, so 80 must be left for the next"
    process.takes(96)
    ceiling.look()
    assert process.given_back == [138, 112]


def test_where_much_is_left_for_others_it_grows_on() -> None:
    process = Process(left=4000)
    ceiling = process.ceiling(planned=320)
    for _ in range(100):
        process.takes(16)
        ceiling.look()
    assert process.given_back == []


def test_where_others_have_taken_what_was_left_a_job_may_still_take_what_was_planned() -> None:
    process = Process()
    ceiling = process.ceiling(planned=320)
    process.left = 10
    process.in_use += 200
    process.free = 120
    ceiling.look()
    assert process.given_back == []


def test_what_is_in_use_is_not_looked_for_again_and_again() -> None:
    process = Process()
    ceiling = process.ceiling(planned=320)
    ceiling.look()
    process.in_use, process.left = 740, 60
    for _ in range(6):
        process.takes(4)
        ceiling.look()
    assert process.given_back == [4, 16], "12 MiB more is worth it"


def test_without_a_plan_nothing_is_given_back() -> None:
    process = Process(in_use=10_000, left=0)
    process.ceiling(planned=None).look()
    assert process.given_back == []


def test_short_tasks_are_not_all_looked_at() -> None:
    process = Process()
    ceiling = MemoryCeiling(process.used_bytes, process.left_bytes, process.give_back, lambda: 7.0)
    for _ in range(5):
        ceiling.look()
    assert process.looks == 1


async def test_the_thread_that_computes_looks_after_each_task() -> None:
    looked, seen = threading.Event(), list[str]()

    def look() -> None:
        seen.append(threading.current_thread().name)
        looked.set()

    compute = ComputeThread("computes", after=look)
    try:
        await compute.run((0,), lambda: seen.append("task"))
        looked.wait()
    finally:
        await compute.close()
    assert seen == ["task", "computes"]


async def test_a_look_that_fails_does_not_end_the_thread() -> None:
    """As where there is no file descriptor left for it."""

    def look() -> None:
        raise OSError(24, "Too many open files")

    compute = ComputeThread(after=look)
    try:
        assert [await compute.run((0,), lambda n=n: n) for n in range(3)] == [0, 1, 2]
        await compute.flush()
    finally:
        await compute.close()
