"""What a device remembers of itself and of others survives a restart, and damage where it may."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from p2ptrain import events
from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import UserError
from p2ptrain.events import Event
from p2ptrain.mesh.identity.device_record import (
    ADDRESSES_FILE,
    DEVICE_FILE,
    DeviceRecord,
    DiskWriter,
    default_name,
    name_of_host,
)
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.notifications import WarnOnce
from p2ptrain.net.fields import NAME_LIMIT_CHARACTERS, checked_name
from p2ptrain.net.link.stream import Address

KNOWN = {"ab" * 32: [("10.0.0.2", 47300), ("fe80::1%eth0", 4000)]}


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def test_name_term_and_addresses_survive_a_restart(folder: StateFolder) -> None:
    file = DeviceRecord(folder, "anna", "host")
    file.rename("anna-2")
    file.keep_term(7)
    file.save_addresses(KNOWN)
    again = DeviceRecord(folder, None, "host")
    assert (again.name, again.asked_name, again.term) == ("anna-2", "anna", 7)
    assert again.addresses() == KNOWN


def test_a_term_that_cannot_be_written_counts_and_is_written_with_the_next_call(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full disk would have a device vote twice in one term."""
    file = DeviceRecord(folder, "anna", "host")

    def full(_folder: StateFolder, _name: str, _content: bytes) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(StateFolder, "write", full)
    with pytest.raises(UserError):
        file.keep_term(7)
    monkeypatch.undo()
    assert file.term == 7
    file.keep_term(7)
    assert DeviceRecord(folder, None, "host").term == 7


@pytest.mark.parametrize("content", [b"", b"\xff\0", b"[1]", bytes(700), b'{"a"'])
def test_damaged_addresses_are_forgotten(folder: StateFolder, content: bytes) -> None:
    """They are only hints: a device finds the others without them."""
    folder.write(ADDRESSES_FILE, content)
    assert DeviceRecord(folder, "anna", "host").addresses() == {}


@pytest.mark.parametrize("content", [b"", b"\xff\0", b"[1]", bytes(700)])
def test_a_damaged_term_is_said(folder: StateFolder, content: bytes) -> None:
    """Without it a device might vote twice in one term."""
    folder.write(DEVICE_FILE, content)
    with pytest.raises(UserError, match=r"device\.json is broken"):
        DeviceRecord(folder, "anna", "host")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("laptop", "laptop"),
        ("pi.fritz.box", "pi"),
        ("Anna's PC", "Anna's PC"),
        ("localhost", None),
        ("localhost.localdomain", None),
        ("", None),
        ("a/b", "a_b"),
        ("x" * 200, "x" * NAME_LIMIT_CHARACTERS),
    ],
)
def test_a_host_s_name(host: str, name: str | None) -> None:
    assert name_of_host(host) == name
    if name is not None:
        assert checked_name(name) == name


def test_there_is_always_a_name_that_can_be_used() -> None:
    assert checked_name(default_name("0123456789abcdef"))


HERE: dict[str, list[Address]] = {"anna": [("10.0.0.2", 4000)]}
THERE: dict[str, list[Address]] = {"anna": [("10.0.0.3", 4000)]}


class _Home:
    """A disk as slow or as full as a test wants it, and what people hear."""

    def __init__(self, tasks: TaskScope) -> None:
        self.is_full = False
        self.may_write = threading.Event()
        self.may_write.set()
        self.written: list[str] = []
        self.threads: set[int] = set()
        self.began = asyncio.Event()
        self.pauses: list[float] = []
        self.paused = asyncio.Event()
        self.pause_is_over = asyncio.Event()
        self.events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        notices = WarnOnce(self.events.append, lambda peer_id: peer_id)
        self.writer = DiskWriter(tasks, notices, self._sleep)

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, events.Warning)]

    def soon(self, text: str, loss: str = "others may be late") -> None:
        self.writer.soon(partial(self._write, text), loss)

    def _write(self, text: str) -> None:
        self.threads.add(threading.get_ident())
        self._loop.call_soon_threadsafe(self.began.set)
        self.may_write.wait(10)
        if self.is_full:
            raise UserError("addresses.json cannot be written: No space left on device")
        self.written.append(text)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.paused.set()
        await self.pause_is_over.wait()


async def test_files_are_written_beside_the_event_loop() -> None:
    async with TaskScope() as tasks:
        home = _Home(tasks)
        home.soon("one")
        await home.paused.wait()
        assert home.written == ["one"]
        assert threading.get_ident() not in home.threads


async def test_what_comes_while_the_disk_is_slow_is_written_together() -> None:
    async with TaskScope() as tasks:
        home = _Home(tasks)
        home.may_write.clear()
        home.soon("one")
        await home.began.wait()
        for text in ("two", "three", "four"):
            home.soon(text)
        home.soon("a name", "names may be old")
        home.may_write.set()
        await home.paused.wait()
        assert home.written[0] == "one"
        assert sorted(home.written[1:]) == ["a name", "four"]


async def test_there_is_a_pause_between_two_writes_and_none_before_the_end() -> None:
    async with TaskScope() as tasks:
        home = _Home(tasks)
        home.soon("one")
        await home.paused.wait()
        home.soon("two")
        assert home.written == ["one"]
        await home.writer.close()
        assert home.written == ["one", "two"]
    assert home.pauses == [5.0]


async def test_a_full_disk_is_reported_once_and_tried_again_at_the_next_change() -> None:
    async with TaskScope() as tasks:
        home = _Home(tasks)
        home.pause_is_over.set()
        home.is_full = True
        for text in ("one", "two"):
            home.soon(text)
            await home.writer.close()
        assert len(home.warnings) == 1
        assert "No space left on device: others may be late" in home.warnings[0]
        home.is_full = False
        home.soon("three")
        await home.writer.close()
    assert home.written == ["three"]


async def test_no_write_outlives_the_mesh() -> None:
    """The next one of this process writes the same file."""
    async with TaskScope() as tasks:
        home = _Home(tasks)
        home.may_write.clear()
        home.soon("one")
        await home.began.wait()
        asyncio.get_running_loop().call_soon(home.may_write.set)
    assert home.written == ["one"]


def test_addresses_that_are_on_disk_are_not_written_again(tmp_path: Path) -> None:
    file = DeviceRecord(StateFolder(tmp_path / "state"), None, "anna")
    file.save_addresses(HERE)
    (tmp_path / "state" / "addresses.json").unlink()
    file.save_addresses(dict(HERE))
    assert file.addresses() == {}
    file.save_addresses(THERE)
    assert file.addresses() == THERE
