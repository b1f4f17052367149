"""One process at a time has a state folder: two members must not have one identity.

The lock is the operating system's (fcntl, msvcrt), so it ends with the process, however that ends.

`control.json` names the address where the running member listens for commands, and the token. A
program that can read this file (0600, in a 0700 folder) may command the member; no other can.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from p2ptrain.errors import UserError
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.net.forms import By, Count

LOCK_NAME = "lock"

_LOCKED_BYTE = 1 << 30
"""Windows locks bytes against reading: this one is far behind what is written."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)
"""What file systems say that lock nothing, as some over a network."""


class FolderBusy(UserError):
    """Another process has the state folder.

    Attributes:
        holder: what that process is, as it wrote into the lock.
    """

    def __init__(self, holder: str, folder: Path) -> None:
        super().__init__(
            f"{holder} already runs with the state folder {folder}: "
            "stop it first, or use another state folder (--state-dir)"
        )
        self.holder = holder


class FolderLock:
    """The lock of a state folder, held inside `with`.

    Args:
        folder: created (0700) if need be.
        command: what holds it, for the message another process shows.
    """

    def __init__(self, folder: Path, command: str) -> None:
        self._folder = folder
        self._command = command
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """As `take`."""
        self.take()
        return self

    def take(self) -> None:
        """Take the lock.

        Raises:
            FolderBusy: another process holds it; the message names that process.
            UserError: the folder cannot be used, or others may read it.
        """
        StateFolder(self._folder)
        try:
            self._descriptor = self._locked()
        except OSError as error:
            raise UserError(
                f"the state folder {self._folder} cannot be used: {error.strerror}"
            ) from error

    def _locked(self) -> int:
        """The file, locked, with our name in it."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self._folder / LOCK_NAME, flags, 0o600)
        try:
            self._lock_or_explain(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"p2ptrain {self._command} (process {os.getpid()})".encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lock_or_explain(self, descriptor: int) -> None:
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise
            raise FolderBusy(_holder(descriptor), self._folder) from None

    def __exit__(self, *_: object) -> None:
        """As `release`."""
        self.release()

    def release(self) -> None:
        """Let go; harmless when repeated. The file stays: without it two could lock two files."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            _unlock(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def _holder(descriptor: int) -> str:
    written = os.read(descriptor, 200).decode(errors="replace").strip()
    return written if written.isprintable() and written else "another p2ptrain"


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


RECORD_NAME = "control.json"


class NotRunning(UserError):
    """No member runs with this state folder."""


def _read_path(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a path")
    return value  # of any characters


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """Where to reach the member.

    Attributes:
        address: path of a unix socket, or "127.0.0.1:PORT" where there are none (Windows).
        token: 64 hex digits; every request carries it.
        pid: of the member's process, for users.
    """

    address: Annotated[str, By(_read_path, str)]
    token: str
    pid: Count


def write_record(folder: Path, record: ControlRecord) -> None:
    """Put `record` into `folder` in one step, readable by its owner only. Raises UserError."""
    StateFolder(folder).write_form(RECORD_NAME, record)


def read_record(folder: Path) -> ControlRecord:
    """The record in `folder`.

    Raises:
        NotRunning: there is none, or it is not one that p2ptrain wrote.
        UserError: others may read the folder or the file.
    """
    try:
        is_there = folder.is_dir()
        record = StateFolder(folder).read_form(RECORD_NAME, ControlRecord) if is_there else None
    except BrokenFile as error:
        raise NotRunning(f"{folder / RECORD_NAME} is damaged: restart `p2ptrain join`") from error
    if record is None:
        raise not_running(folder)
    return record


def remove_record(folder: Path, record: ControlRecord) -> None:
    """Remove `record` unless another process has put its own in its place."""
    with contextlib.suppress(NotRunning):
        if read_record(folder) == record:
            StateFolder(folder).remove(RECORD_NAME)


def not_running(folder: Path) -> NotRunning:
    """The error of a command that needs a running member."""
    return NotRunning(
        "p2ptrain is not running on this device. Start it: p2ptrain join. (If you started it "
        f"with --state-dir, give the same here; now it is {folder}.)"
    )
