"""Devices that have measured work on until all have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.worker import device_profile
from p2ptrain.worker.device_profile import KeepBusy


class Steps:
    """Without end, counted; an event for who waits for them."""

    def __init__(self, fails_at: int = 0) -> None:
        self.taken = 0
        self.fails_at = fails_at
        self._loop = asyncio.get_running_loop()
        self.some = asyncio.Event()
        self.closed = asyncio.Event()

    def __iter__(self) -> Iterator[None]:
        try:
            while True:
                self.taken += 1
                if self.taken == self.fails_at:
                    raise RuntimeError("out of memory")
                if self.taken == 3:
                    self._loop.call_soon_threadsafe(self.some.set)
                yield
        finally:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.closed.set)


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    compute = ComputeThread()
    yield compute
    await compute.close()


async def test_it_works_until_all_have_measured(compute: ComputeThread) -> None:
    company, steps = KeepBusy(compute), Steps()
    company.begin(company.steps(iter(steps)))
    await steps.some.wait()
    company.end()
    await steps.closed.wait()
    await company.close()


async def test_whatever_else_there_is_to_compute_goes_first(compute: ComputeThread) -> None:
    company, steps = KeepBusy(compute), Steps()
    company.begin(company.steps(iter(steps)))
    await steps.some.wait()
    taken = await asyncio.gather(*(compute.run((1,), lambda: steps.taken) for _ in range(5)))
    assert taken[0] == taken[-1]
    await company.close()


async def test_a_new_beginning_ends_what_was(compute: ComputeThread) -> None:
    company, before, after = KeepBusy(compute), Steps(), Steps()
    company.begin(company.steps(iter(before)))
    await before.some.wait()
    company.begin(company.steps(iter(after)))
    await before.closed.wait()
    await after.some.wait()
    await company.close()


async def test_it_ends_by_itself_where_nobody_says_so(
    compute: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_profile, "MAX_SECONDS", 0.0)
    company, steps = KeepBusy(compute), Steps()
    company.begin(company.steps(iter(steps)))
    await asyncio.sleep(0)
    await compute.run((10,), lambda: None)
    assert steps.taken == 0
    await company.close()


async def test_an_error_ends_it_and_nothing_else(compute: ComputeThread) -> None:
    company, steps = KeepBusy(compute), Steps(fails_at=2)
    company.begin(company.steps(iter(steps)))
    await steps.closed.wait()
    assert await compute.run((0,), lambda: 7) == 7
    company.end()
    await company.close()
