"""`train` in the place of a running `join`: the pairing window goes along and comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2ptrain.control.lock import FolderLock
from p2ptrain.control.own_place import own_place
from p2ptrain.control.place import Lender, Place
from p2ptrain.control.server import ControlServer
from p2ptrain.mesh.window import Window


class FakeMember:
    """Of which only the window is asked."""

    def __init__(self, window: Window | None) -> None:
        self.window = window


async def _lend(lender: Lender) -> None:
    await lender.wanted.wait()
    lender.window = Window.opened("12345678", asyncio.get_running_loop().time())
    lender.lend(Place("desk", 4000, lender.window))


async def _borrowed(folder: Path, member: FakeMember | None) -> Lender:
    """The lender of a place that `member` had for a moment."""
    lender = Lender()
    with FolderLock(folder, "join"):
        async with ControlServer(folder, lender):
            lending = asyncio.create_task(_lend(lender))
            async with own_place(folder, "train") as own:
                assert (own.name, own.port) == ("desk", 4000)
                assert own.window is not None
                assert own.window.code == "12345678"
                own.member = member
            await asyncio.wait_for(lender.given_back.wait(), 5)
            await lending
    return lender


async def test_a_removal_meanwhile_closes_the_window_of_join_too(tmp_path: Path) -> None:
    lender = await _borrowed(tmp_path, FakeMember(None))
    assert lender.window is None


async def test_wrong_tries_meanwhile_count_for_join_too(tmp_path: Path) -> None:
    now = asyncio.get_running_loop().time()
    lender = await _borrowed(tmp_path, FakeMember(Window("12345678", now + 60, wrong_tries=4)))
    assert lender.window is not None
    assert lender.window.wrong_tries == 4
    assert lender.window.closes_at == pytest.approx(now + 60, abs=30)


async def test_a_member_that_did_not_start_leaves_the_window_as_it_was(
    tmp_path: Path,
) -> None:
    lender = await _borrowed(tmp_path, None)
    assert lender.window is not None
    assert lender.window.code == "12345678"


async def test_a_place_of_our_own_has_no_window_yet(tmp_path: Path) -> None:
    async with own_place(tmp_path, "train") as own:
        assert (own.name, own.port) == (None, None)
        assert own.window is None
