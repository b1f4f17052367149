"""One process at a time has a state folder."""

from __future__ import annotations

import errno
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from p2ptrain.control import member_lock
from p2ptrain.control.member_lock import (
    ControlRecord,
    FolderBusy,
    FolderLock,
    NotRunning,
    read_record,
    remove_record,
    write_record,
)
from p2ptrain.errors import UserError


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


@pytest.mark.parametrize(("call", "number"), [("write", errno.ENOSPC), ("ftruncate", errno.EROFS)])
def test_a_disk_that_takes_nothing_is_said_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refuse(*_arguments: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(UserError, match=f"{tmp_path} cannot be used: {os.strerror(number)}"):
            FolderLock(tmp_path, "join").__enter__()
    with FolderLock(tmp_path, "join"):  # nothing was left locked
        pass


def test_a_file_system_without_locks_is_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(member_lock, "_lock", refuse)
    with pytest.raises(UserError, match=r"cannot be used: No locks") as caught:
        FolderLock(tmp_path, "join").__enter__()
    assert not isinstance(caught.value, FolderBusy)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    with FolderLock(folder, "join"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


RECORD = ControlRecord("/tmp/socket", "ab" * 32, 4711)


@pytest.mark.parametrize("address", ["/tmp/socket", "/tmp/caf\udce9\n/socket", "/" + "a" * 900])
def test_what_is_written_is_read(tmp_path: Path, address: str) -> None:
    """A folder may have any name, one that is no text included."""
    record = replace(RECORD, address=address)
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert stat.S_IMODE((tmp_path / "control.json").stat().st_mode) == 0o600


def test_nothing_else_is_left_in_the_folder(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    write_record(tmp_path, RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["control.json"]


def test_no_record_means_no_member(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="Start it: p2ptrain join"):
        read_record(tmp_path / "never")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"address": "x", "token": "y"}', "\xff"])
def test_a_damaged_record_says_so(tmp_path: Path, text: str) -> None:
    write_record(tmp_path, RECORD)
    (tmp_path / "control.json").write_text(text, encoding="latin-1")
    with pytest.raises(NotRunning, match="damaged"):
        read_record(tmp_path)


def test_a_borrower_s_record_is_not_removed(tmp_path: Path) -> None:
    other = ControlRecord("/tmp/other", "cd" * 32, 4712)
    write_record(tmp_path, other)
    remove_record(tmp_path, RECORD)
    assert read_record(tmp_path) == other
    remove_record(tmp_path, other)
    with pytest.raises(NotRunning):
        read_record(tmp_path)
