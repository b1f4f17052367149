"""One process at a time has a state folder."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from p2ptrain.control.lock import FolderBusy, FolderLock


def test_the_second_one_learns_who_was_first(tmp_path: Path) -> None:
    with (
        FolderLock(tmp_path, "join"),
        pytest.raises(FolderBusy, match=rf"p2ptrain join \(process {os.getpid()}\) already runs"),
        FolderLock(tmp_path, "join"),
    ):
        pass


def test_the_lock_ends_with_its_context(tmp_path: Path) -> None:
    for _ in range(2):
        with FolderLock(tmp_path, "join"):
            pass


def test_a_lock_file_left_by_a_dead_process_does_not_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "join"):
        pass
    (tmp_path / "lock").write_text("p2ptrain join (process 1)")
    with FolderLock(tmp_path, "join"):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    with FolderLock(folder, "join"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
