"""Addresses of others are kept beside everything else, and a full disk costs nothing but them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

from p2ptrain.errors import UserError
from p2ptrain.mesh.address_keeper import AddressKeeper
from p2ptrain.mesh.addresses import Address
from p2ptrain.mesh.device_file import DeviceFile
from p2ptrain.mesh.state_folder import StateFolder
from p2ptrain.mesh.tasks import TaskScope

HERE: dict[str, list[Address]] = {"anna": [("10.0.0.2", 4000)]}
THERE: dict[str, list[Address]] = {"anna": [("10.0.0.3", 4000)]}


class _File(DeviceFile):
    """Writes once it may, as slow or as full as a test wants it."""

    def __init__(self, path: Path) -> None:
        super().__init__(StateFolder(path), None, "anna")
        self.is_full = False
        self.may_write = threading.Event()
        self.may_write.set()
        self.written: list[Mapping[str, list[Address]]] = []
        self.threads: set[int] = set()
        self.began = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def save_addresses(self, addresses: Mapping[str, list[Address]]) -> None:
        self.threads.add(threading.get_ident())
        self._loop.call_soon_threadsafe(self.began.set)
        self.may_write.wait(10)
        if self.is_full:
            raise UserError("addresses.json cannot be written: No space left on device")
        super().save_addresses(addresses)
        self.written.append(addresses)


class _Home:
    """Where the others are, and what people are told."""

    def __init__(self, path: Path, tasks: TaskScope) -> None:
        self.file = _File(path / "state")
        self.addresses = HERE
        self.warnings: list[str] = []
        self.keeper = AddressKeeper(self.file, lambda: self.addresses, tasks, self.warnings.append)


async def test_addresses_are_written_beside_the_event_loop_and_only_if_new(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        home = _Home(tmp_path, tasks)
        for _ in range(2):
            home.keeper.remember()
            await home.keeper.close()
    assert home.file.written == [HERE]
    assert home.file.addresses() == HERE
    assert threading.get_ident() not in home.file.threads


async def test_what_comes_while_the_disk_is_slow_is_written_together(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        home = _Home(tmp_path, tasks)
        home.file.may_write.clear()
        home.keeper.remember()
        await home.file.began.wait()
        home.addresses = THERE
        for _ in range(5):
            home.keeper.remember()
        home.file.may_write.set()
        await home.keeper.close()
    assert home.file.written == [HERE, THERE]


async def test_a_full_disk_is_told_and_tried_again_at_the_next_link(tmp_path: Path) -> None:
    async with TaskScope() as tasks:
        home = _Home(tmp_path, tasks)
        home.file.is_full = True
        home.keeper.remember()
        await home.keeper.close()
        assert "No space left on device" in home.warnings[0]
        home.file.is_full = False
        home.keeper.remember()
        await home.keeper.close()
    assert home.file.written == [HERE]
    assert len(home.warnings) == 1


async def test_no_write_outlives_the_mesh(tmp_path: Path) -> None:
    """The next one of this process writes the same file."""
    async with TaskScope() as tasks:
        home = _Home(tmp_path, tasks)
        home.file.may_write.clear()
        home.keeper.remember()
        await home.file.began.wait()
        asyncio.get_running_loop().call_soon(home.file.may_write.set)
    assert home.file.written == [HERE]
