"""What the doctor says of the state folder is what `join` will find."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from p2ptrain.cli.checks import Severity
from p2ptrain.cli.checks.machine import box, state_folder
from p2ptrain.process.confinement import Confinement


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_can_be_written_is_well_and_left_as_it_was(
    made: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "state"
    if made:
        folder.mkdir(parents=True, mode=0o700)
    before = sorted(tmp_path.rglob("*"))
    assert state_folder(folder).verdict is Severity.OK
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("made", [True, False])
def test_a_full_disk_is_named(made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    if made:
        folder.mkdir(mode=0o700)

    def full(dir: Path) -> object:
        assert dir == (folder if made else tmp_path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    check = state_folder(folder)
    assert check.verdict is Severity.BAD
    assert check.found == f"{folder} cannot be written: No space left on device"
    assert "has room" in check.advice


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = state_folder(tmp_path / "file" / "state")
    assert check.verdict is Severity.BAD
    assert "Not a directory" in check.found


def test_what_protects_from_models_of_others_is_said() -> None:
    good = box([Confinement.PROCESS, Confinement.MEMORY, Confinement.FILES, Confinement.CALLS])
    assert good.verdict is Severity.OK
    assert "no files, no network" in good.found
    assert box([Confinement.PROCESS]).verdict is Severity.WARN
    assert box().found
