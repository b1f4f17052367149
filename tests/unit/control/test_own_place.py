"""The place that `train` borrows is its own until it ends, whatever becomes of the lender."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest

from p2ptrain.control import own_place
from p2ptrain.control.lock import FolderBusy, FolderLock
from p2ptrain.control.place import Lender, Place
from p2ptrain.control.server import ControlServer

PLACE = Place("laptop", 4000, None)


class _Join:
    """What a running `join` has of its state folder."""

    def __init__(self, folder: Path) -> None:
        self.lender = Lender()
        self._folder = folder
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        self._stack.enter_context(FolderLock(self._folder, "join"))
        await self._stack.enter_async_context(ControlServer(self._folder, self.lender))
        lending = asyncio.create_task(self._lend())
        self._stack.push_async_callback(asyncio.wait_for, lending, 5.0)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _lend(self) -> None:
        await self.lender.wanted.wait()
        self.lender.lend(PLACE)


@pytest.fixture
async def join(tmp_path: Path) -> AsyncIterator[_Join]:
    join = _Join(tmp_path)
    await join.start()
    yield join
    await join.stop()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once `train` has the lock itself."""
    event = asyncio.Event()

    class Lock(FolderLock):
        def __enter__(self) -> Self:
            super().__enter__()
            event.set()
            return self

    monkeypatch.setattr(own_place, "FolderLock", Lock)
    monkeypatch.setattr(own_place, "_RETRY_SECONDS", 0.0)
    return event


async def test_a_folder_whose_join_stops_is_taken_over_until_train_ends(
    tmp_path: Path, join: _Join, taken: asyncio.Event
) -> None:
    async with own_place.own_place(tmp_path, "train") as own:
        assert (own.name, own.port) == (PLACE.name, PLACE.port)
        await join.stop()
        await asyncio.wait_for(taken.wait(), 5.0)
        with pytest.raises(FolderBusy, match="p2ptrain train"), FolderLock(tmp_path, "join"):
            pass
    with FolderLock(tmp_path, "join"):
        pass


async def test_a_folder_whose_join_goes_on_stays_with_it(
    tmp_path: Path, join: _Join, taken: asyncio.Event
) -> None:
    async with own_place.own_place(tmp_path, "train"):
        pass
    await asyncio.wait_for(join.lender.given_back.wait(), 5.0)
    assert not taken.is_set()
    with pytest.raises(FolderBusy, match="p2ptrain join"), FolderLock(tmp_path, "train"):
        pass


async def test_a_folder_that_somebody_else_has_by_then_is_given_up_with_a_word(
    tmp_path: Path,
    join: _Join,
    taken: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = asyncio.Event()

    class Busy(FolderLock):
        def __enter__(self) -> Self:
            asked.set()
            raise FolderBusy("p2ptrain join (process 1)", tmp_path)

    async with own_place.own_place(tmp_path, "train"):
        monkeypatch.setattr(own_place, "STARTING_SECONDS", -1.0)
        monkeypatch.setattr(own_place, "FolderLock", Busy)
        await join.stop()
        await asyncio.wait_for(asked.wait(), 5.0)
    assert not taken.is_set()
    assert "process 1" in caplog.text
