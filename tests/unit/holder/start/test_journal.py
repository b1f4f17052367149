"""What a holder's next process finds of its job."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError, TrainingError, UserError
from p2ptrain.holder.start import journal
from p2ptrain.holder.start.journal import (
    JOB_FILE,
    REPORTED_FILE,
    Journal,
    JournalEntry,
    find_journal,
)
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.messages.assign import PlanInForce
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.cores.job_history import NotedHistory as Noted
from p2ptrain.recovery.cores.job_history import ReportedProgress
from p2ptrain.recovery.version import Lineage, Version
from p2ptrain.state import checkpoint_files, ended_jobs
from p2ptrain.state.checkpoint_files import Checkpoint, CheckpointProgress
from tests.unit.messages.test_assignment import assignment, shared

NEW = JournalEntry.new("f00d-1", "f00d", "abc", 0, ReportedProgress(0, 0))
PLACED = assignment(shared(3, 1))
PLAN = {
    "format": "p2ptrain.plan/1",
    "planner": "pp",
    "micro_batch": PLACED.micro_batch,
    "micro_batches": PLACED.micro_batches,
    "stages": [
        {
            "units": [0, 3],
            "devices": [{"name": "a", "share": 3}, {"name": "b", "share": 1}],
            "warmup": 1,
        }
    ],
    "predicted": {"round_seconds": 1.0, "samples_per_s": 8.0, "peak_bytes": {"a": 9, "b": 5}},
    "left_out": [],
}
IN_FORCE = PlanInForce(PLACED, Plan.from_json(PLAN, batch_size=PLACED.batch_size))
FIRST = Lineage().begun(1, Version(0, 0))


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "job")


def put_down(book: Journal, noted: Noted, in_force: PlanInForce | None) -> None:
    asyncio.run(book.begun(noted, in_force))


def begun(folder: StateFolder, warnings: list[str] | None = None) -> Journal:
    book = Journal(folder, NEW, ([] if warnings is None else warnings).append, sync_seconds=0.0)
    put_down(book, Noted(65, Lineage(), None), None)
    put_down(book, Noted(2, FIRST, None), IN_FORCE)
    return book


def test_generation_numbers_that_were_reserved_are_used_up_before_there_is_a_plan() -> None:
    assert Journal(None, NEW, pytest.fail).noted is None
    noted = Journal(None, replace(NEW, next_generation=65), pytest.fail).noted
    assert noted is not None
    assert noted.next_generation == 65


def found_in(folder: StateFolder, warnings: list[str] | None = None) -> JournalEntry | None:
    return find_journal(folder, ([] if warnings is None else warnings).append)


def test_a_job_is_found_as_it_was_written_down(folder: StateFolder) -> None:
    book = begun(folder)
    for step in range(1, 4):
        book.committed(ReportedProgress(step, 0))
    found = found_in(folder)
    assert found == replace(
        NEW,
        reported=ReportedProgress(3, 0),
        next_generation=2,
        lineage=FIRST,
        assignment=PLACED,
        plan=PLAN,
    )
    assert found.in_force == IN_FORCE
    assert found.noted.placed is not None
    assert found.noted.placed.devices == ("a", "b")


def test_other_releases_find_the_same_keys(folder: StateFolder) -> None:
    book = Journal(folder, NEW, print)
    said = {
        "format": "p2ptrain.job/2",
        **{"job": "f00d-1", "fingerprint": "f00d", "weights": "abc", "first_step": 0},
        **{"next_generation": 65, "lineage": [], "assignment": None, "plan": None, "stable": None},
        "took_part": {},
    }
    put_down(book, Noted(65, Lineage(), None), None)
    assert json.dumps(folder.read_json(JOB_FILE)) == json.dumps(said)
    put_down(book, Noted(2, FIRST, None, Version(3, 1), (("a", 1), ("b", 2))), IN_FORCE)
    blob = base64.b64encode(PLACED.to_bytes()).decode()
    said |= {"next_generation": 2, "lineage": [[1, 0, 0]], "assignment": blob, "plan": PLAN}
    said |= {"stable": [3, 1], "took_part": {"a": 1, "b": 2}}
    assert json.dumps(folder.read_json(JOB_FILE)) == json.dumps(said)


def test_before_the_first_plan_the_numbers_are_reserved(folder: StateFolder) -> None:
    put_down(Journal(folder, NEW, lambda _: None), Noted(65, Lineage(), None), None)
    found = found_in(folder)
    assert found is not None
    assert (found.next_generation, found.in_force, found.noted.placed) == (65, None, None)


def test_a_job_that_is_over_leaves_the_word_that_it_is(folder: StateFolder) -> None:
    book = begun(folder)
    book.done()
    book.committed(ReportedProgress(9, 0))
    put_down(book, Noted(66, FIRST, None), IN_FORCE)
    assert found_in(folder) is None
    assert [file.name for file in folder.path.iterdir()] == [ended_jobs.ENDED_FILE]
    assert ended_jobs.find_ended(folder) == (NEW.job,)


def test_a_job_without_a_folder_writes_nothing() -> None:
    book = Journal(None, NEW, lambda _: None)
    put_down(book, Noted(2, FIRST, None), IN_FORCE)
    book.committed(ReportedProgress(1, 0))
    book.done()


def test_any_bit_that_flips_is_found_out(folder: StateFolder) -> None:
    """Another step or digest would be believed otherwise."""
    begun(folder)
    whole = folder.read(JOB_FILE)
    assert whole is not None
    draw = Random(7)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (folder.path / JOB_FILE).write_bytes(bytes(damaged))
        assert found_in(folder) is None


@given(cut=st.integers(0, 23), flipped=st.integers(0, 24 * 8 - 1))
def test_a_damaged_number_is_never_believed(cut: int, flipped: int) -> None:
    whole = journal.reported_bytes(ReportedProgress(1234, 1200))
    damaged = bytearray(whole)
    damaged[flipped // 8] ^= 1 << flipped % 8
    for content in (whole[:cut], bytes(damaged), None):
        with pytest.raises(ProtocolError):
            journal.read_reported(content)


@pytest.mark.parametrize("name", [JOB_FILE, REPORTED_FILE])
@pytest.mark.parametrize("content", [b"", b"{}", b"not JSON", b"[1, 2]"])
def test_a_broken_journal_is_no_journal(folder: StateFolder, name: str, content: bytes) -> None:
    begun(folder)
    folder.write(name, content)
    warnings: list[str] = []
    assert found_in(folder, warnings) is None
    [warning] = warnings
    assert str(folder.path / JOB_FILE) in warning


@pytest.mark.parametrize(
    "changes",
    [{"plan": {}}, {"assignment": "AAAA"}, {"took_part": {"b": -1}}, {"plan": PLAN | {"mode": 7}}],
)
def test_a_plan_that_this_version_does_not_know_is_no_journal(
    folder: StateFolder, changes: dict[str, object]
) -> None:
    begun(folder)
    folder.write_json(JOB_FILE, folder.read_json(JOB_FILE) | changes)
    assert found_in(folder) is None


def test_a_disk_that_fails_is_reported_once_and_an_old_journal_does_not_stay(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation numbers would be used again."""

    def full(name: str, value: object) -> None:
        raise UserError("job.json cannot be written: No space left on device")

    warnings: list[str] = []
    book = begun(folder, warnings)
    monkeypatch.setattr(folder, "write_json", full)
    put_down(book, Noted(66, FIRST, None), IN_FORCE)
    put_down(book, Noted(67, FIRST, None), IN_FORCE)
    book.committed(ReportedProgress(1, 0))
    [warning] = warnings
    assert "No space left on device" in warning
    assert found_in(folder) is None
    assert ended_jobs.find_ended(folder) == ()  # it goes on


def test_a_step_that_cannot_be_written_ends_the_journal(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would tell steps twice."""

    def broken(descriptor: int, data: bytes) -> int:
        raise OSError(5, "Input/output error")

    warnings: list[str] = []
    book = begun(folder, warnings)
    monkeypatch.setattr(os, "write", broken)
    book.committed(ReportedProgress(1, 0))
    monkeypatch.undo()
    assert len(warnings) == 1
    assert found_in(folder) is None


@pytest.mark.parametrize("begins", [True, False], ids=["a generation begins", "it is tried again"])
async def test_a_disk_that_takes_it_again_has_the_whole_journal(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """What happened meanwhile too; people hear of it once."""
    heard = asyncio.Event()
    warnings: list[str] = []

    def warn(words: str) -> None:
        warnings.append(words)
        if "again" in words:
            heard.set()

    def read_only(name: str, value: object) -> None:
        raise UserError("it cannot be written: Read-only file system")

    retry = 1000.0 if begins else 0.0
    book = Journal(folder, NEW, warn, sync_seconds=0.0, retry_seconds=retry)
    await book.begun(Noted(2, FIRST, None), IN_FORCE)
    with monkeypatch.context() as patched:
        for name in ("write", "write_json"):
            patched.setattr(folder, name, read_only)
        await book.begun(Noted(66, FIRST, None), IN_FORCE)
        book.committed(ReportedProgress(7, 0))
        assert found_in(folder) is None
    syncing = asyncio.create_task(book.keep_synced())
    if begins:
        await book.begun(Noted(130, FIRST, None), IN_FORCE)
    await heard.wait()
    book.committed(ReportedProgress(8, 0))
    syncing.cancel()
    found = found_in(folder)
    assert found is not None
    assert found.next_generation == (130 if begins else 66)
    assert found.reported == ReportedProgress(8, 0)
    assert len(warnings) == 2
    assert "Read-only file system" in warnings[0]


CAPTURED = Checkpoint(CheckpointProgress(3, "d", 8, 4, 0, "SGD"), {"w": torch.ones(2)}, {})

SIZES = (((3,), (5,)),)


async def test_sizes_are_named_once_the_state_they_begin_with_is_on_the_disk(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else is written down meanwhile is this job's, without them."""
    book = await asyncio.to_thread(begun, folder)
    write = checkpoint_files.save
    found: list[JournalEntry | None] = []

    def slowly(place: Path, point: Checkpoint) -> None:
        asyncio.run_coroutine_threadsafe(book.measured(((1, 0.5),)), loop).result()
        found.append(found_in(folder))
        write(place, point)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(checkpoint_files, "save", slowly)
    await book.captured_again(SIZES, "first", CAPTURED)
    [during], after = found, found_in(folder)
    assert during is not None
    assert (during.sizes, during.first_fingerprint) == ((), "")
    assert after is not None
    assert (after.sizes, after.first_fingerprint) == (SIZES, "first")
    captured = journal.captured_state(folder, pytest.fail)
    assert captured is not None
    assert captured.progress.step == 3


async def test_a_state_that_cannot_be_saved_leaves_no_record(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    book = await asyncio.to_thread(begun, folder, warnings)

    def full(place: Path, point: Checkpoint) -> None:
        raise TrainingError("no space left")

    monkeypatch.setattr(checkpoint_files, "save", full)
    await book.captured_again(SIZES, "first", CAPTURED)
    assert found_in(folder) is None
    assert "training cannot be continued" in warnings[0]


async def test_what_is_stable_is_written_with_the_next_sync(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = await asyncio.to_thread(begun, folder)
    loop, written = asyncio.get_running_loop(), asyncio.Event()
    write = folder.write_json

    def telling(name: str, value: object) -> None:
        write(name, value)
        loop.call_soon_threadsafe(written.set)

    monkeypatch.setattr(folder, "write_json", telling)
    syncing = asyncio.create_task(book.keep_synced())
    book.stable(Version(40, 1))
    book.committed(ReportedProgress(41, 0))
    await written.wait()
    syncing.cancel()
    found = found_in(folder)
    assert found is not None
    assert found.stable == Version(40, 1)
    assert found.reported == ReportedProgress(41, 0)


async def test_a_late_word_does_not_undo_a_newer_generation(folder: StateFolder) -> None:
    book = await asyncio.to_thread(begun, folder)
    book.stable(Version(40, 1))
    late = book._late
    assert late is not None
    await book.begun(Noted(66, FIRST, None, Version(40, 1), (("b", 1),)), IN_FORCE)
    book._sync(late)
    found = found_in(folder)
    assert found is not None
    assert found.next_generation == 66
