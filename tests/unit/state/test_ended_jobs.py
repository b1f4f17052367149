"""What a device remembers of its jobs that are over."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.state import ended_jobs
from p2ptrain.state.ended_jobs import ENDED_FILE, MAX_JOBS


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "job")


def test_the_newest_are_remembered_each_once(folder: StateFolder) -> None:
    assert ended_jobs.find_ended(folder) == ()
    for number in range(MAX_JOBS + 1):
        ended_jobs.note_ended(folder, {f"job {number}"})
    ended_jobs.note_ended(folder, {"job 5"})
    found = ended_jobs.find_ended(folder)
    assert len(found) == len(set(found)) == MAX_JOBS
    assert found[-2:] == (f"job {MAX_JOBS}", "job 5")
    assert "job 0" not in found


@pytest.mark.parametrize("content", [b"", b"{", b"7", b'{"a": 1}', b"[1, null]", b"\xff"])
def test_what_cannot_be_read_says_of_no_job_that_it_is_over(
    folder: StateFolder, content: bytes
) -> None:
    folder.write(ENDED_FILE, content)
    assert ended_jobs.find_ended(folder) == ()
    ended_jobs.note_ended(folder, {"job"})
    assert ended_jobs.find_ended(folder) == ("job",)


def test_a_disk_that_is_full_ends_nothing_else(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: StateFolder, name: str, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFolder, "write_json", full)
    ended_jobs.note_ended(folder, {"job"})
    assert ended_jobs.find_ended(folder) == ()
