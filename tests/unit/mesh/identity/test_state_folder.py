"""The state folder is private and its files are replaced as a whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from p2ptrain.errors import UserError
from p2ptrain.mesh.identity import state_folder
from p2ptrain.mesh.identity.state_folder import StateFolder

posix_only = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX modes here")


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@posix_only
def test_folder_and_files_are_private(tmp_path: Path) -> None:
    """S21: folder and files are private."""
    os.umask(0o022)
    folder = StateFolder(tmp_path / "deep" / "state")
    folder.write("key", b"secret")
    assert (_mode(folder.path), _mode(folder.path / "key")) == (0o700, 0o600)
    assert folder.read("key") == b"secret"


@posix_only
def test_an_empty_folder_of_ours_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    StateFolder(path)
    assert _mode(path) == 0o700


@posix_only
@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """S21: a folder others may read is refused."""
    StateFolder(tmp_path / "state").write("key", b"secret")
    (tmp_path / "state").chmod(mode)
    with pytest.raises(UserError, match="chmod 700"):
        StateFolder(tmp_path / "state")


@posix_only
def test_a_file_others_may_read_is_refused(tmp_path: Path) -> None:
    """S21: a file others may read is refused."""
    folder = StateFolder(tmp_path / "state")
    folder.write("key", b"secret")
    (folder.path / "key").chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        folder.read("key")


def test_a_missing_file_is_none(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    assert folder.read("nothing") is None
    assert folder.read_json("nothing") is None


def test_a_file_that_is_not_json_is_broken(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.write("table.json", b"{")
    with pytest.raises(UserError, match=r"table\.json is broken"):
        folder.read_json("table.json")


def test_a_disk_that_is_read_only_by_now_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses to remove the temporary file too, whether there is one or not."""
    folder = StateFolder(tmp_path / "state")

    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(state_folder, "_write_synced", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match="key cannot be written: Read-only"):
        folder.write("key", b"secret")


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(UserError, match="state"):
        StateFolder(tmp_path / "state")


def _rewrite_for_ever(path: Path) -> None:
    folder = StateFolder(path)
    for content in (b"a" * 100_000, b"b" * 100_000) * 1_000_000:
        folder.write("file", content)


@posix_only
def test_a_killed_writer_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """S21: a killed writer leaves the old or the new."""
    folder = StateFolder(tmp_path / "state")
    folder.write("file", b"a" * 100_000)
    fork = multiprocessing.get_context("fork")
    for _ in range(5):
        writer = fork.Process(target=_rewrite_for_ever, args=(folder.path,))
        writer.start()
        before = (folder.path / "file").stat().st_mtime_ns
        while (folder.path / "file").stat().st_mtime_ns == before:
            pass
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        assert folder.read("file") in (b"a" * 100_000, b"b" * 100_000)
    StateFolder(folder.path)
    assert [file.name for file in folder.path.iterdir()] == ["file"]


@posix_only
@pytest.mark.parametrize("root", [True, False])
def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    """Root may read it, and would have another's identity, and leave files of its own."""
    folder = StateFolder(tmp_path / "state")
    folder.write("key", b"secret")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root and owner else owner + 1)
    with pytest.raises(UserError, match=r"belongs to another user .* --state-dir.*chown -R"):
        StateFolder(folder.path)
    with pytest.raises(UserError, match="key belongs to another user"):
        folder.read("key")
