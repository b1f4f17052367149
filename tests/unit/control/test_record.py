"""control.json: private, whole, and never somebody else's."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.control.member_lock import (
    ControlRecord,
    NotRunning,
    read_record,
    remove_record,
    write_record,
)

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
