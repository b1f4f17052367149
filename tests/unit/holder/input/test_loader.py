from __future__ import annotations

import asyncio
import threading

import pytest

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.loader import Prefetcher


async def test_results_come_in_the_order_of_the_keys() -> None:
    async with Prefetcher(lambda key: key * 10, range(5), ahead=2) as loader:
        assert [value async for value in loader] == [0, 10, 20, 30, 40]


async def test_never_more_than_the_given_number_ahead() -> None:
    asked: list[int] = []
    third = threading.Event()

    def load(key: int) -> int:
        asked.append(key)
        if len(asked) == 3:
            third.set()
        return key

    async with Prefetcher(load, range(100), ahead=3) as loader:
        await asyncio.to_thread(third.wait, 5)
        assert asked == [0, 1, 2]
        assert await anext(loader) == 0
        assert await anext(loader) == 1
        assert len(asked) <= 2 + 3


async def test_all_calls_run_in_one_thread_that_is_not_the_loops() -> None:
    async with Prefetcher(lambda _: threading.get_ident(), range(4), ahead=4) as loader:
        threads = {ident async for ident in loader}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_a_cancelled_wait_loses_nothing() -> None:
    gate = threading.Event()

    def load(key: int) -> int:
        gate.wait(5)
        return key

    async with Prefetcher(load, range(3), ahead=2) as loader:
        waiting = asyncio.ensure_future(anext(loader))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        assert [value async for value in loader] == [0, 1, 2]


async def test_what_load_raises_reaches_the_reader_at_its_turn() -> None:
    def load(key: int) -> int:
        if key == 1:
            raise ScriptError("data[1] failed")
        return key

    async with Prefetcher(load, range(3), ahead=3) as loader:
        assert await anext(loader) == 0
        with pytest.raises(ScriptError, match=r"data\[1\]"):
            await anext(loader)


async def test_leaving_stops_loading() -> None:
    asked: list[int] = []
    async with Prefetcher(asked.append, range(100), ahead=2) as loader:
        await anext(loader)
    seen = len(asked)
    assert seen <= 3
    assert not [t for t in threading.enumerate() if t.name.startswith("p2ptrain-data")]


def test_ahead_must_be_positive() -> None:
    with pytest.raises(ValueError, match="ahead"):
        Prefetcher(lambda key: key, range(3), ahead=0)
