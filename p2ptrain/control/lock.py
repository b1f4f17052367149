"""One process at a time has a state folder: two members with one identity would fight for it.

The lock is the operating system's (fcntl, msvcrt), so it ends with the process, however that ends.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from p2ptrain.errors import UserError
from p2ptrain.mesh.state_folder import StateFolder

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
            self._lock_or_tell(descriptor)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"p2ptrain {self._command} (process {os.getpid()})".encode())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lock_or_tell(self, descriptor: int) -> None:
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise
            raise FolderBusy(_holder(descriptor), self._folder) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
