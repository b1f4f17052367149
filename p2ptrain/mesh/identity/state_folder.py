"""The private folder where a device keeps what must survive a restart.

It holds the device's key, so only its owner may read it, and every file is replaced as a whole: a
process killed at any instruction leaves the old content or the new, never a mixture (temporary
file, fsync, rename, fsync of the folder). Each file's seal shows damage by the disk (files.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.errors import OptionError, ProtocolError, UserError
from p2ptrain.files import SealBroken, open_json, replace_file, seal_json
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form

_PRIVATE_FOLDER = 0o700

_PRIVATE_FILE = 0o600

_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_HAS_MODES = os.name == "posix"

_TEMPORARY_SUFFIX = ".tmp"

T = TypeVar("T")


class StateFolder:
    """One device's folder; `path` is created on first use."""

    def __init__(self, path: Path) -> None:
        """Open or create the folder.

        Raises:
            UserError: it cannot be used, or others may read it.
        """
        self.path = path
        try:
            path.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._check_folder()
            self._remove_leftovers()
        except OSError as error:
            raise UserError(f"the state folder {path} cannot be used: {error.strerror}") from error

    def read(self, name: str) -> bytes | None:
        """The file's content, or None where there is no such file.

        Raises:
            UserError: others may read it, or it cannot be read.
        """
        file = self.path / name
        try:
            if not file.exists():
                return None
            self._check_owner(file)
            if _open_to_others(file):
                raise UserError(
                    f"{file} can be read by other users of this machine: run "
                    f"`chmod 600 {file}`, and pair again if another user may have copied it"
                )
            return file.read_bytes()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from error

    def write(self, name: str, content: bytes) -> None:
        """Replace the file as a whole.

        Raises:
            UserError: the disk is full or the folder is not ours.
        """
        temporary = self.path / f"{name}.{os.getpid()}{_TEMPORARY_SUFFIX}"
        try:
            _write_synced(temporary, content)
            replace_file(temporary, self.path / name)
            _sync_folder(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):  # a disk that is read-only now refuses that too
                temporary.unlink()
            raise UserError(f"{self.path / name} cannot be written: {error.strerror}") from error

    def read_json(self, name: str) -> Any:
        """The file's JSON value, or None where there is no such file.

        Raises:
            UserError: as `read`.
            BrokenFile: the file is damaged.
        """
        content = self.read(name)
        if content is None:
            return None
        try:
            return open_json(content)
        except SealBroken as error:
            raise BrokenFile(self.path / name, str(error)) from error

    def read_form(self, name: str, form: type[T]) -> T | None:
        """The file's value as a form; what later releases say beside it is not looked at.

        Raises:
            UserError: as `read`.
            BrokenFile: the file is damaged.
        """
        value = self.read_json(name)
        try:
            return None if value is None else read_form(form, value, "the file", extra=True)
        except ProtocolError as error:
            raise BrokenFile(self.path / name, str(error)) from error

    def write_json(self, name: str, value: Mapping[str, object]) -> None:
        """Replace the file by `value` as JSON, sealed."""
        self.write(name, seal_json(value))

    def write_form(self, name: str, form: object) -> None:
        """Replace the file by a form, sealed."""
        self.write_json(name, write_form(form))

    def remove(self, name: str) -> None:
        """Remove the file if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def _check_folder(self) -> None:
        if not self.path.is_dir():
            raise UserError(f"the state folder {self.path} is not a folder: choose another one")
        self._check_owner(self.path)
        if not _open_to_others(self.path):
            return
        if any(self.path.iterdir()):
            raise UserError(
                f"the state folder {self.path} can be read by other users of this machine: run "
                f"`chmod 700 {self.path}`, or choose another one with --state-dir"
            )
        self.path.chmod(_PRIVATE_FOLDER)  # still empty, so nothing was ever seen

    def _check_owner(self, path: Path) -> None:
        """Root may read everything, but another user's identity is still not its own."""
        if not _HAS_MODES or path.stat().st_uid == os.geteuid():
            return
        raise UserError(
            f"{path} belongs to another user of this machine ({_owner(path)}): run p2ptrain as "
            "that user, or choose another folder with --state-dir, or take it over with "
            f"`chown -R {os.geteuid()} {self.path}`"
        )

    def _remove_leftovers(self) -> None:
        """Temporary files of processes that were killed while writing."""
        import psutil  # here: it loads for 0.01 s, which --help need not

        for file in self.path.glob(f"*.*{_TEMPORARY_SUFFIX}"):
            process = file.name.removesuffix(_TEMPORARY_SUFFIX).rpartition(".")[2]
            if process.isdigit() and not psutil.pid_exists(int(process)):
                file.unlink(missing_ok=True)


class BrokenFile(UserError):
    """A file of ours does not hold what it should.

    Attributes:
        file: its path.
        why: what is wrong with it.
    """

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(
            f"{file} is broken ({why}): restore it from a copy, or remove it and pair this device "
            "again"
        )
        self.file = file
        self.why = why


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # a number without a name
        return str(path.stat().st_uid)


def _open_to_others(path: Path) -> bool:
    return _HAS_MODES and bool(path.stat().st_mode & _OTHERS)


def _write_synced(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as out:
        if _HAS_MODES:
            os.fchmod(descriptor, _PRIVATE_FILE)
        out.write(content)
        out.flush()
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where a folder can be synced."""
    if not _HAS_MODES:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


STATE_DIR_VARIABLE = "P2PTRAIN_STATE_DIR"


def default_state_dir() -> Path:
    """The folder that the environment names, else the system's place for such data.

    Raises:
        OptionError: the environment's begins with the `~` of a user who is not here.
    """
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise OptionError(f"${STATE_DIR_VARIABLE} is {chosen!r}: {error}") from error
    return usual_state_dir()


def usual_state_dir() -> Path:
    """The system's place for such data."""
    import platformdirs  # here, so that --help need not load it

    return Path(platformdirs.user_data_dir("p2ptrain", appauthor=False))
