"""A checkpoint is read beside what keeps this device among the living."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import OptionError, PeerError
from p2ptrain.holder.snapshots import full_snapshots
from p2ptrain.holder.snapshots.full_snapshots import CheckpointSnapshots
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.recovery.version import Version
from p2ptrain.state.checkpoint_files import (
    Checkpoint,
    CheckpointProgress,
    WrittenCheckpoint,
    load_written,
    save,
)
from p2ptrain.state.transfer_server import TransferServer, version_source
from tests.support.memory_household import MemoryHousehold

VERSION = Version(8, 1)
JOB = "job"


class Copies:
    """Of a model of one tensor; the newest checkpoint is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.warned: list[str] = []
        self.states = TransferServer(MemoryHousehold(["holder"])["holder"])
        description = SimpleNamespace(state_names=lambda first, end: ("w",))
        first = {"model:w": torch.zeros(4)}
        prepared = SimpleNamespace(captured=SimpleNamespace(description=description), state=first)
        self.copies = CheckpointSnapshots(
            self.states, JOB, cast("PreparedJob", prepared), self.warned.append
        )
        weights = {"w": torch.full((4,), 8.0)}
        progress = CheckpointProgress(8, "digest", 10, 2, 0, "SGD")
        self.copies.take(VERSION, save(folder, Checkpoint(progress, weights, {})))

    async def read(self) -> dict[str, Tensor]:
        """For this device or another one."""
        found = await self.states.read(JOB, version_source(VERSION), 0, 1)
        return dict(found.tensors)


async def test_the_event_loop_goes_on_while_a_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow(written: WrittenCheckpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        assert threading.current_thread() is not threading.main_thread()
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return load_written(written, wanted)

    monkeypatch.setattr(full_snapshots, "load_written", slow)
    reading = asyncio.create_task(Copies(tmp_path).read())
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait([reading, waiting], return_when="FIRST_COMPLETED")
    assert not reading.done()
    go_on.set()
    assert torch.equal((await reading)["model:w"], torch.full((4,), 8.0))


async def test_one_that_two_cannot_read_is_reported_once_and_not_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(written: WrittenCheckpoint, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        raise OptionError("it is damaged")

    monkeypatch.setattr(full_snapshots, "load_written", damaged)
    copies = Copies(tmp_path)
    found = await asyncio.gather(copies.read(), copies.read(), return_exceptions=True)
    assert [type(one) for one in found] == [PeerError, PeerError]
    assert len(copies.warned) == 1
    assert copies.states.held(JOB) == ()
    with pytest.raises(PeerError, match="no state"):
        await copies.read()
