"""Going to sleep and waking, by a system that says so and by clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.manners.sleep import JumpWatch, SleepTimes, SleepWatch


class Announcer:
    """A system that a test sends to sleep."""

    def __init__(self, *, works: bool = True) -> None:
        self.is_held = False
        self.held = asyncio.Event()
        self.on_sleep: Callable[[bool], None] | None = None
        self.on_release = lambda: None
        self._works = works

    async def connect(self, on_sleep: Callable[[bool], None]) -> bool:
        self.on_sleep = on_sleep
        return self._works

    async def hold(self) -> None:
        self.is_held = True
        self.held.set()

    def release(self) -> None:
        self.is_held = False
        self.on_release()

    def close(self) -> None:
        pass


async def test_a_system_that_says_so_waits_until_the_member_has_left() -> None:
    system = Announcer()
    async with SleepWatch(system) as watch, asyncio.timeout(5.0):
        await system.held.wait()
        assert system.on_sleep is not None
        system.on_sleep(True)
        assert watch.rejoin.is_set()
        assert not watch.awake.is_set()
        assert system.is_held
        watch.has_left()
        assert not system.is_held
        system.held.clear()
        system.on_sleep(False)
        assert watch.awake.is_set()
        assert not watch.rejoin.is_set()
        await system.held.wait()
    assert not system.is_held


async def test_where_no_system_says_so_clocks_show_it_afterwards() -> None:
    clock = [0.0, 100.0]
    times = SleepTimes(look_seconds=0.001)
    watch = SleepWatch(Announcer(works=False), times, lambda: clock[0], lambda: clock[1])
    async with watch:
        await asyncio.sleep(0.005)
        assert not watch.rejoin.is_set()
        clock[1] += 3600.0
        async with asyncio.timeout(5.0):
            await watch.rejoin.wait()
        assert watch.awake.is_set()


def test_a_clock_that_is_corrected_a_little_is_no_sleep() -> None:
    watch = JumpWatch(5.0)
    assert watch.slept_seconds(10.0, 1000.0) == 0
    assert watch.slept_seconds(11.0, 1003.0) == 0
    assert watch.slept_seconds(12.0, 1064.0) == 60.0
    assert watch.slept_seconds(13.0, 1065.0) == 0
    assert watch.slept_seconds(14.0, 500.0) == 0
