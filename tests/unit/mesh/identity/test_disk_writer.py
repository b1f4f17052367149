"""Files are written beside everything else, and a full disk costs nothing but what was new."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

from p2ptrain import events
from p2ptrain.aio.tasks import TaskScope
from p2ptrain.errors import UserError
from p2ptrain.events import Event
from p2ptrain.mesh.discovery.addresses import Address
from p2ptrain.mesh.identity.device_record import DeviceRecord, DiskWriter
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.notifications import WarnOnce

HERE: dict[str, list[Address]] = {"anna": [("10.0.0.2", 4000)]}
THERE: dict[str, list[Address]] = {"anna": [("10.0.0.3", 4000)]}


class _Home:
    """A disk as slow or as full as a test wants it, and what people are told."""

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
