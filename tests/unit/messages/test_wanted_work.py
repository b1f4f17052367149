"""Work that another device wants for as long as it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

from p2ptrain.errors import PeerError
from p2ptrain.messages.calls import CancellableWork
from tests.support.memory_household import MemoryHousehold


async def _one() -> int:
    return 1


async def _never(begun: asyncio.Event, ended: asyncio.Event) -> int:
    begun.set()
    try:
        await asyncio.Event().wait()
        raise AssertionError
    finally:
        ended.set()


async def test_who_asks_again_gets_the_new_answer_and_the_old_work_ends() -> None:
    """It waited no longer for the first one, and had no time to say so."""
    async with MemoryHousehold(["a", "b"]) as mesh:
        work, asker = CancellableWork(mesh["a"], "look"), mesh["b"].self_id
        begun, ended = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(work.do(asker, asker, partial(_never, begun, ended)))
        await begun.wait()
        assert await work.do(asker, asker, _one) == 1
        with pytest.raises(PeerError, match="that look has been given up"):
            await first
        assert ended.is_set()


async def test_work_that_ends_late_leaves_the_next_one_to_be_given_up() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        work, asker = CancellableWork(mesh["a"], "look"), mesh["b"].self_id
        begun, ended = asyncio.Event(), asyncio.Event()
        stuck, asked_again = asyncio.Event(), asyncio.Event()

        async def slow_to_end() -> int:
            begun.set()
            try:
                await stuck.wait()
            finally:
                await asked_again.wait()
            raise AssertionError

        first = asyncio.create_task(work.do(asker, asker, slow_to_end))
        await begun.wait()
        work.give_up(asker)
        begun.clear()
        second = asyncio.create_task(work.do(asker, asker, partial(_never, begun, ended)))
        await begun.wait()
        asked_again.set()
        with pytest.raises(PeerError):
            await first
        work.give_up(asker)
        with pytest.raises(PeerError):
            await second
        assert ended.is_set()


async def test_work_that_is_given_up_before_it_begins_is_never_made() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        work, asker = CancellableWork(mesh["a"], "look"), mesh["b"].self_id
        begun = False

        def begin() -> Coroutine[Any, Any, int]:
            nonlocal begun
            begun = True
            return _one()

        asking = asyncio.create_task(work.do(asker, asker, begin))
        await asyncio.sleep(0)  # it is under way, and its task has not run yet
        assert work.has(asker)
        work.give_up(asker)
        with pytest.raises(PeerError, match="given up"):
            await asking
        assert not begun
