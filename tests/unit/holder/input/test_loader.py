from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.loader import read_ahead


async def test_results_come_in_the_order_of_the_source() -> None:
    assert [value async for value in read_ahead(iter(range(10, 60, 10)), 2)] == [10, 20, 30, 40, 50]


async def test_never_more_than_the_given_number_ahead() -> None:
    asked: list[int] = []
    third = threading.Event()

    def load(key: int) -> int:
        asked.append(key)
        if len(asked) == 5:
            third.set()
        return key

    async with aclosing(read_ahead(map(load, range(100)), 3)) as loader:
        assert await anext(loader) == 0
        assert await anext(loader) == 1
        await asyncio.to_thread(third.wait, 5)
        assert asked == [0, 1, 2, 3, 4]


async def test_all_calls_run_in_one_thread_that_is_not_the_loops() -> None:
    threads = {ident async for ident in read_ahead((threading.get_ident() for _ in range(4)), 4)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_what_the_source_raises_reaches_the_reader_at_its_turn() -> None:
    def load(key: int) -> int:
        if key == 1:
            raise ScriptError("data[1] failed")
        return key

    async with aclosing(read_ahead(map(load, range(3)), 3)) as loader:
        assert await anext(loader) == 0
        with pytest.raises(ScriptError, match=r"data\[1\]"):
            await anext(loader)


async def test_closing_stops_loading() -> None:
    asked: list[int] = []

    def load(key: int) -> int:
        asked.append(key)
        return key

    async with aclosing(read_ahead(map(load, range(100)), 2)) as loader:
        await anext(loader)
    assert len(asked) <= 3
    assert not [t for t in threading.enumerate() if t.name.startswith("p2ptrain-data")]
