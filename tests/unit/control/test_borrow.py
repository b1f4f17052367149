"""`train` in the place of a running `join`: it has the lock, and the pairing window goes along."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2ptrain.control.borrow import own_lease
from p2ptrain.control.lease import RETRY_SECONDS, LeasedIdentity, Lender
from p2ptrain.control.member_lock import FolderBusy, FolderLock, NotRunning, read_record
from p2ptrain.control.server import ControlServer
from p2ptrain.mesh.trust.pairing_window import PairingWindow

_TAKES_THE_LOCK = """
import sys, time
from pathlib import Path
from p2ptrain.control.member_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "train")
while True:
    try:
        lock.take()
        break
    except Exception:
        time.sleep(0.01)
print("taken", flush=True)
time.sleep(60)
"""


class _Join:
    """What a running `join` has of its state folder; it leaves its place as soon as asked."""

    def __init__(self, folder: Path) -> None:
        now = asyncio.get_running_loop().time()
        self.window = PairingWindow.opened("12345678", now)
        self.lender = Lender(take_seconds=1.0)
        self.lock = FolderLock(folder, "join")
        self.stop = asyncio.Event()
        self.back = asyncio.Event()
        self.running: asyncio.Task[None]
        self._server = ControlServer(folder, self.lender)

    async def run(self, started: asyncio.Event) -> None:
        with self.lock:
            async with self._server:
                started.set()
                while not self.stop.is_set():
                    await self.lender.wanted.wait()
                    place = LeasedIdentity("desk", 4000, self.window)
                    await self.lender.lend(place, self.lock, self.stop)
                    self.back.set()

    async def ends(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.running, 20)

    async def is_back(self) -> None:
        await asyncio.wait_for(self.back.wait(), 20)


@pytest.fixture
async def join(tmp_path: Path) -> AsyncIterator[_Join]:
    join, started = _Join(tmp_path), asyncio.Event()
    join.running = asyncio.create_task(join.run(started))
    await started.wait()
    yield join
    join.running.cancel()
    await asyncio.gather(join.running, return_exceptions=True)


def _is_locked(folder: Path) -> str:
    """By whom."""
    try:
        with FolderLock(folder, "another"):
            return ""
    except FolderBusy as busy:
        return busy.holder.split(" (")[0]


async def test_a_borrower_has_name_port_window_and_lock_until_it_ends(
    tmp_path: Path, join: _Join
) -> None:
    async with own_lease(tmp_path, "train") as own:
        assert (own.name, own.port) == ("desk", 4000)
        assert own.window is not None
        assert own.window.code == "12345678"
        assert _is_locked(tmp_path) == "p2ptrain train"
        assert not join.back.is_set()
    await join.is_back()
    assert _is_locked(tmp_path) == "p2ptrain join"
    assert join.lender.window is not None
    assert join.lender.window.closes_at == pytest.approx(join.window.closes_at, abs=30)


async def test_a_removal_meanwhile_closes_the_window_of_join_too(
    tmp_path: Path, join: _Join
) -> None:
    async with own_lease(tmp_path, "train") as own:
        own.window = None
    await join.is_back()
    assert join.lender.window is None


async def test_wrong_tries_meanwhile_count_for_join_too(tmp_path: Path, join: _Join) -> None:
    async with own_lease(tmp_path, "train") as own:
        assert own.window is not None
        own.window = own.window.after_wrong_try()
    await join.is_back()
    assert join.lender.window is not None
    assert join.lender.window.wrong_tries == 1


async def test_a_place_is_lent_again(tmp_path: Path, join: _Join) -> None:
    for _ in range(2):
        join.back.clear()
        async with own_lease(tmp_path, "train") as own:
            assert own.port == 4000
        await join.is_back()


async def test_a_place_of_our_own_has_no_window_yet(tmp_path: Path) -> None:
    async with own_lease(tmp_path, "train") as own:
        assert own == LeasedIdentity(None, None, None)
        assert _is_locked(tmp_path) == "p2ptrain train"
    assert _is_locked(tmp_path) == ""


async def test_a_join_that_stops_meanwhile_leaves_the_lock_to_the_borrower(
    tmp_path: Path, join: _Join
) -> None:
    async with own_lease(tmp_path, "train"):
        await join.ends()
        with pytest.raises(NotRunning):
            read_record(tmp_path)
        assert _is_locked(tmp_path) == "p2ptrain train"
    assert _is_locked(tmp_path) == ""


async def test_join_comes_back_once_a_killed_borrower_s_lock_is_free_its_window_closed(
    tmp_path: Path, join: _Join
) -> None:
    argv = [sys.executable, "-c", _TAKES_THE_LOCK, str(tmp_path)]
    borrower = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    asking = asyncio.create_task(join.lender.step_aside())
    assert await asking == LeasedIdentity("desk", 4000, join.window)
    assert borrower.stdout is not None
    assert await borrower.stdout.readline() == b"taken\n"
    await asyncio.sleep(3 * RETRY_SECONDS)  # it looks at another process's lock
    assert not join.back.is_set()
    borrower.kill()
    await borrower.wait()
    await join.is_back()
    assert join.lender.window is None


async def test_a_borrower_that_never_takes_the_lock_leaves_all_as_it_was(
    tmp_path: Path, join: _Join
) -> None:
    await join.lender.step_aside()
    await join.is_back()
    assert _is_locked(tmp_path) == "p2ptrain join"
    assert join.lender.window == join.window
