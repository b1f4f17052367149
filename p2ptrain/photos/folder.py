"""The folder of pictures on the holder: label/digest.jpg, counted, added, moved and read.

Its user chooses it on that device. Browsers give contents and labels, never paths; links inside
the folder are not followed. A picture comes into sight whole: it is written beside the labels'
folders, where ImageFolder does not look, and renamed. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from p2ptrain.errors import UserError, size_text
from p2ptrain.files import replace_file
from p2ptrain.photos.picture import (
    PictureKind,
    checked_picture,
    is_picture_name,
    label_named,
    picture_kind,
    picture_named,
)
from p2ptrain.photos.uncertain import UncertainPicture, read_uncertain

_TEMPORARY_SUFFIX = ".upload"

_FORGOTTEN_SECONDS = 3600.0
"""After which a file being written is abandoned."""

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class PhotoLimits:
    """Of one folder.

    Attributes:
        picture_bytes: of one that is added.
        pixels: of one that is added, where Pillow is there to look.
        shown_bytes: of one that lies there already.
        pictures: all of them.
        total_bytes: all of them.
        free_bytes: of the disk, which stay free.
    """

    picture_bytes: int = 8 << 20
    pixels: int = 16_000_000
    shown_bytes: int = 32 << 20
    pictures: int = 100_000
    total_bytes: int = 20_000_000_000
    free_bytes: int = 1_000_000_000
    labels: int = 200


@dataclass(frozen=True, slots=True)
class LabelCount:
    """A label and how many pictures it has."""

    name: str
    pictures: int


@dataclass(frozen=True, slots=True)
class Added:
    """Where a picture lies.

    Attributes:
        is_new: it was not there before. One that is there under another label stays there.
    """

    label: str
    file: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class _Counted:
    changed_ns: int
    pictures: int
    size_bytes: int


class PhotoFolder:
    """One folder; may be used by several threads."""

    def __init__(self, path: Path, limits: PhotoLimits | None = None) -> None:
        """Open the folder; its last part is made where it is missing.

        Raises:
            UserError: it cannot be used.
        """
        self.limits = limits or PhotoLimits()
        self._lock = threading.Lock()
        self._counted: dict[str, _Counted] = {}
        try:
            self.path = path.expanduser().resolve()
            if self.path in (Path.home().resolve(), Path(self.path.anchor)):
                raise UserError(f"{self.path} is no folder for pictures alone: choose one that is")
            self.path.mkdir(exist_ok=True)
            self._sweep()
            os.unlink(self._temporary(b""))  # it can be written to
        except (OSError, RuntimeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            raise UserError(f"{path} cannot be used for pictures: {why or error}") from error

    def labels(self) -> tuple[LabelCount, ...]:
        """In the order of ImageFolder's classes.

        Raises:
            UserError: the folder cannot be read.
        """
        with self._lock:
            return tuple(LabelCount(n, c.pictures) for n, c in self._count().items())

    def label(self, text: str) -> str:
        """The label that a person means by it; it need not have pictures.

        Raises:
            UserError: it cannot be one.
        """
        with self._lock:
            return label_named(text, self._count())

    def add(self, label: str, content: bytes) -> Added:
        """Keep a picture under a label, once.

        Raises:
            UserError: it is refused; says why.
        """
        if len(content) > self.limits.picture_bytes:
            raise UserError(f"a picture has {size_text(self.limits.picture_bytes)} at most")
        kind = checked_picture(content)
        _check_decodable(content, self.limits.pixels)
        file = picture_named(content, kind)
        with self._lock, _writing(self.path):
            counted = self._count()
            name = label_named(label, counted)
            for other in counted:
                place = self.path / other / file
                if _size_of(place) == len(content) or (other != name and os.path.lexists(place)):
                    return Added(other, file, is_new=False)
            self._check_room(counted, name, len(content))
            temporary = self._temporary(content)
            try:
                replace_file(temporary, self._made(name) / file)
            finally:
                temporary.unlink(missing_ok=True)
            self._counted.pop(name, None)
        return Added(name, file, is_new=True)

    def move(self, label: str, file: str, to: str) -> str:
        """Correct a picture's label; returns the new one. A label without pictures goes.

        Raises:
            UserError: it cannot be moved.
        """
        with self._lock, _writing(self.path):
            counted = self._count()
            place = self._place(counted, label, file)
            name = label_named(to, counted)
            if name == label:
                return name
            self._check_labels(counted, name)
            moved = self._made(name) / file
            if os.path.lexists(moved):
                if _read(moved, self.limits.shown_bytes) != _read(place, self.limits.shown_bytes):
                    raise UserError(f"{name} has another picture that is called {file}")
                place.unlink()
            else:
                replace_file(place, moved)
            with contextlib.suppress(OSError):  # it has others
                place.parent.rmdir()
            for changed in (label, name):
                self._counted.pop(changed, None)
        return name

    def read(self, label: str, file: str) -> tuple[PictureKind, bytes]:
        """A picture that lies here.

        Raises:
            UserError: there is none.
        """
        with self._lock:
            place = self._place(self._count(), label, file)
        content = _read(place, self.limits.shown_bytes)
        kind = picture_kind(content)
        if kind is None:
            raise UserError(f"{file} is no picture that a browser shows")
        return kind, content

    def uncertain(self) -> tuple[int, int, tuple[UncertainPicture, ...]]:
        """Of the last evaluation: its step, pictures looked at, those still where it saw them."""
        found = read_uncertain(self.path)
        if found is None:
            return 0, 0, ()
        with self._lock:
            labels = self._count()
        there = (
            picture
            for picture in found.pictures
            if picture.label in labels
            and is_picture_name(picture.file)
            and _size_of(self.path / picture.label / picture.file) is not None
        )
        return found.step, found.evaluated, tuple(there)

    # -- inside ----------------------------------------------------------------------------------

    def _count(self) -> dict[str, _Counted]:
        """By label; those whose folder has changed are counted again."""
        counted = {}
        try:
            with os.scandir(self.path) as entries:
                found = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
            for name in found:
                if name[0] == "." or not name.isprintable():
                    continue
                changed_ns = (self.path / name).stat().st_mtime_ns
                known = self._counted.get(name)
                if known is None or known.changed_ns != changed_ns:
                    known = _counted(self.path / name, changed_ns)
                counted[name] = known
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        self._counted = counted
        return dict(counted)

    def _place(self, counted: dict[str, _Counted], label: str, file: str) -> Path:
        """Raises UserError: no such picture."""
        if label in counted and file and is_picture_name(file):
            place = self.path / label / file
            if _size_of(place) is not None:
                return place
        raise UserError("that picture is not there any more: it was moved or removed")

    def _made(self, label: str) -> Path:
        """The label's folder. Raises UserError: something else is called so."""
        place = self.path / label
        try:
            place.mkdir(exist_ok=True)
        except FileExistsError:
            raise UserError(f"{place} is a file, so it cannot be a label") from None
        if place.is_symlink():
            raise UserError(f"{place} is a link, which is not followed: choose another label")
        return place

    def _check_labels(self, counted: dict[str, _Counted], label: str) -> None:
        if label not in counted and len(counted) >= self.limits.labels:
            raise UserError(f"there are {self.limits.labels} labels already")

    def _check_room(self, counted: dict[str, _Counted], label: str, size_bytes: int) -> None:
        limits = self.limits
        self._check_labels(counted, label)
        if sum(c.pictures for c in counted.values()) >= limits.pictures:
            raise UserError(f"the folder has {limits.pictures:,} pictures already")
        if sum(c.size_bytes for c in counted.values()) + size_bytes > limits.total_bytes:
            raise UserError(f"the folder has {size_text(limits.total_bytes)} of pictures already")
        if shutil.disk_usage(self.path).free - size_bytes < limits.free_bytes:
            raise UserError(
                f"the disk of {self.path} has less than {size_text(limits.free_bytes)} left"
            )

    def _temporary(self, content: bytes) -> Path:
        """A file with it, on the disk, that no training looks at. Raises OSError."""
        place = self.path / f".{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS
        try:
            with os.fdopen(os.open(place, flags, 0o644), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            place.unlink(missing_ok=True)
            raise
        return place

    def _sweep(self) -> None:
        """What a process that was killed has left."""
        before = time.time() - _FORGOTTEN_SECONDS
        for place in self.path.glob(f".*{_TEMPORARY_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if place.lstat().st_mtime < before:
                    place.unlink()


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Says what a disk refuses."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else error.strerror or str(error)
        raise UserError(f"{folder} cannot be written to: {why}") from error


def _counted(folder: Path, changed_ns: int) -> _Counted:
    with os.scandir(folder) as entries:
        sizes = [
            entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if is_picture_name(entry.name) and entry.is_file(follow_symlinks=False)
        ]
    return _Counted(changed_ns, len(sizes), sum(sizes))


def _size_of(place: Path) -> int | None:
    """Of a file; None where there is none, or a link."""
    try:
        found = place.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _read(place: Path, limit_bytes: int) -> bytes:
    """Raises UserError: it cannot be read, or is too large to be shown."""
    try:
        with os.fdopen(os.open(place, os.O_RDONLY | _NO_LINKS), "rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise UserError(f"{place.name} cannot be read: {error.strerror}") from error
    if len(content) > limit_bytes:
        raise UserError(f"{place.name} is larger than {size_text(limit_bytes)}")
    return content


def _check_decodable(content: bytes, pixels_limit: int) -> None:
    """Where Pillow is there, which the training needs anyway.

    Raises:
        UserError: it cannot be decoded, or is too large once it is.
    """
    try:
        from PIL import Image
    except ImportError:
        return
    try:
        with Image.open(BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as image:
            pixels = image.width * image.height
            if pixels <= pixels_limit:
                image.load()
    except Exception as error:  # decoders have no error of their own
        raise UserError(f"this picture cannot be decoded: {error}") from error
    if pixels > pixels_limit:
        raise UserError(f"this picture has {pixels:,} pixels: {pixels_limit:,} at most")
