"""Checkpoints beside the rounds: one at a time, of one version, in any generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from p2ptrain.errors import PeerError, TrainingError
from p2ptrain.holder.snapshots import checkpointer
from p2ptrain.holder.snapshots.checkpointer import Checkpointer, CheckpointSchedule
from p2ptrain.recovery.version import Version
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint, CheckpointProgress


class Run:
    """A run that writes a checkpoint after every second update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gathered: list[Version] = []
        self.warned: list[str] = []
        self.refuse: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.evaluated: int | None = None
        cadence = CheckpointSchedule(2, 0.0)
        self.checkpointer = Checkpointer(
            folder, cadence, self._gather, self._progress, self.warned.append, Mock()
        )

    async def _gather(self, version: Version) -> Mapping[str, Tensor]:
        self.gathered.append(version)
        await self.gate.wait()
        if self.refuse is not None:
            raise self.refuse
        return {"model:w": torch.full((3,), float(version.step))}

    async def wants(self, step: int) -> bool:
        """Of an update in the middle of an epoch of data."""
        return await self.checkpointer.wants(step, ends_epoch=False)

    def _progress(self, step: int) -> CheckpointProgress:
        return CheckpointProgress(step, "digest", 10, 2, 0, "SGD", self.evaluated)

    def evaluate(self, step: int) -> None:
        """People hear of the metrics after so many updates."""
        self.evaluated = step
        self.checkpointer.evaluated(step)

    @property
    def written(self) -> int:
        """The newest step on disk."""
        return checkpoint_files.load(self.folder, pytest.fail).progress.step


async def _stages(version: Version) -> Mapping[str, Tensor]:
    return {"model:w": torch.full((3,), float(version.step))}


async def _nobody_there(version: Version) -> Mapping[str, Tensor]:
    raise PeerError("it is gone")


async def test_what_is_wanted_is_taken_and_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not await run.wants(1)
    assert await run.wants(2)
    assert run.checkpointer.is_due(2)
    assert not run.checkpointer.is_due(1)
    run.checkpointer.take(Version(2, 5))
    assert run.checkpointer.reading == Version(2, 5)
    await run.checkpointer.idle()
    assert run.checkpointer.reading is None
    assert run.gathered == [Version(2, 5)]
    assert run.written == 2


async def test_a_step_that_is_made_again_is_not_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (2, 4):
        assert await run.wants(step)
        run.checkpointer.take(Version(step, 1))
        await run.checkpointer.idle()
    run.checkpointer.begin()
    assert not await run.wants(2)
    assert not await run.wants(4)
    assert await run.wants(6)


@pytest.mark.parametrize("error", [PeerError("it is gone"), TimeoutError()], ids=["gone", "slow"])
async def test_a_state_that_cannot_be_had_is_left_out(tmp_path: Path, error: Exception) -> None:
    run = Run(tmp_path)
    run.refuse = error
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.idle()
    assert run.warned == []
    assert run.checkpointer.failure is None
    run.refuse = None
    assert await run.wants(2), "made again, it is wanted again"
    run.checkpointer.take(Version(2, 3))
    await run.checkpointer.idle()
    assert run.written == 2


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
async def test_no_memory_for_a_checkpoint_is_reported_and_ends_nothing(
    tmp_path: Path, error: Exception
) -> None:
    run = Run(tmp_path)
    run.refuse = error
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.idle()
    assert run.warned == [str(run.checkpointer.failure)]
    assert "too little memory" in str(run.checkpointer.failure)
    run.refuse = None
    assert await run.wants(4)
    run.checkpointer.take(Version(4, 1))
    await run.checkpointer.idle()
    assert run.written == 4
    assert run.checkpointer.failure is None


async def test_a_disk_that_stays_full_is_reported_once_and_once_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    async def take(step: int) -> None:
        assert await run.wants(step)
        run.checkpointer.take(Version(step, 1))
        await run.checkpointer.idle()

    def full(folder: Path, content: Checkpoint) -> checkpoint_files.WrittenCheckpoint:
        raise TrainingError(f"could not write a checkpoint to {folder}: no space left")

    for first in (2, 12):  # twice
        run.warned.clear()
        with monkeypatch.context() as patched:
            patched.setattr(checkpointer, "save", full)
            await take(first)
            await take(first + 2)
            assert run.warned == [f"could not write a checkpoint to {tmp_path}: no space left"]
            run.refuse = MemoryError()  # something else
            await take(first + 4)
            assert len(run.warned) == 2
            run.refuse = None
        await take(first + 6)
        await take(first + 8)
        assert len(run.warned) == 3
        assert run.warned[-1].startswith("checkpoints can be written again: that of step ")


async def test_the_last_one_is_made_up_for_from_the_stages_themselves(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.refuse = PeerError("there is no link to it")
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.make_sure(Version(2, 1), _stages)
    run.checkpointer.conclude(2)
    assert run.written == 2
    assert (run.warned, run.checkpointer.failure) == ([], None)


async def test_one_that_is_written_is_not_written_again_in_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.make_sure(Version(2, 1), _nobody_there)
    run.checkpointer.conclude(2)
    assert (run.warned, run.checkpointer.failure) == ([], None)


async def test_a_last_one_that_is_not_to_be_had_is_reported_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for generation in (1, 2):  # it breaks off, and is begun again
        await run.checkpointer.make_sure(Version(2, generation), _nobody_there)
        assert run.warned == [], "the next generation may have it"
    run.checkpointer.conclude(2)
    run.checkpointer.conclude(2)
    assert run.warned == [str(run.checkpointer.failure)]
    assert "no checkpoint of step 2, the last one: it is gone" in str(run.checkpointer.failure)


async def test_a_last_one_that_failed_is_neither_tried_nor_reported_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.refuse = MemoryError()
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.make_sure(Version(2, 1), _stages)
    run.checkpointer.conclude(2)
    assert len(run.warned) == 1
    assert "too little memory" in str(run.checkpointer.failure)


async def test_an_generation_that_ends_before_the_update_holds_nothing_up(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert await run.wants(2)
    run.checkpointer.begin()
    assert not run.checkpointer.is_due(2)
    assert await run.wants(2)


async def test_what_is_being_read_goes_on_when_an_generation_begins(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.gate.clear()
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    run.checkpointer.begin()
    waiting = asyncio.create_task(run.wants(4))
    await asyncio.sleep(0)
    assert not waiting.done()
    run.gate.set()
    assert await waiting
    assert run.written == 2


async def test_a_checkpoint_says_whether_its_evaluation_was_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.idle()
    assert checkpoint_files.load(tmp_path, pytest.fail).progress.evaluated is None
    run.evaluate(2)
    assert await run.wants(4), "no two write at once"
    assert checkpoint_files.load(tmp_path, pytest.fail).progress.evaluated == 2


async def test_an_evaluation_reported_while_its_checkpoint_is_written_stands_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    loop = asyncio.get_running_loop()

    def save(folder: Path, content: Checkpoint) -> checkpoint_files.WrittenCheckpoint:
        written = checkpoint_files.save(folder, content)
        loop.call_soon_threadsafe(run.evaluate, 2)
        return written

    monkeypatch.setattr(checkpointer, "save", save)
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await run.checkpointer.idle()
    assert checkpoint_files.load(tmp_path, pytest.fail).progress.evaluated == 2


async def test_what_is_being_written_is_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(folder: Path, content: Checkpoint) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        checkpoint_files.save(folder, content)

    monkeypatch.setattr(checkpointer, "save", slow)
    assert await run.wants(2)
    run.checkpointer.take(Version(2, 1))
    await begun.wait()
    closing = asyncio.create_task(run.checkpointer.close())
    await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert run.written == 2
