"""Sealed files, which show whether they are whole, and the replacement of a file as a whole.

    {                                      # sealed: xxh3
     "sealed": "xxh3",                     -----BEGIN CERTIFICATE-----
     ...                                   ...
     "xxh3": "9f2c6e14a07b3d58"            # xxh3: 9f2c6e14a07b3d58
    }

The seal is a checksum (XXH3, 64 bits) of all that stands before it. The beginning announces it, so
that damage to the checksum itself, or its loss, does not make the file an unsealed one. Unsealed
files of earlier versions are read as they are. A seal protects against accidents, not against
intent: a program that may write the file may seal it.

Windows refuses to replace a file while any process has it open, such as a virus scanner, so a
replacement is tried again for some milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_DIGITS = 16


class SealBroken(ValueError):
    """The content is not what was sealed, or cannot be read at all."""


@dataclass(frozen=True, slots=True)
class _Seal:
    """How a kind of file says it: what it begins with, and what stands around the checksum."""

    begin: bytes
    before: bytes
    after: bytes

    def end(self, body: bytes) -> bytes:
        return self.before + xxhash.xxh3_64_hexdigest(body).encode() + self.after

    def check(self, content: bytes) -> bool:
        """Whether it is sealed. Raises SealBroken: it was, and has changed."""
        size = len(self.before) + _DIGITS + len(self.after)
        body, end = content[:-size], content[-size:]
        if not content.startswith(self.begin) and not end.startswith(self.before):
            return False
        if end != self.end(body):
            raise SealBroken("its content does not fit its checksum")
        return True


_JSON = _Seal(b'{\n "sealed": "xxh3"', b' "xxh3": "', b'"\n}\n')

_LINES = _Seal(b"# sealed: xxh3\n", b"# xxh3: ", b"\n")


def seal_json(value: Mapping[str, object]) -> bytes:
    """A JSON object, sealed."""
    text = json.dumps({"sealed": "xxh3", **value}, indent=1).encode()
    body = text.removesuffix(b"\n}") + b",\n"
    return body + _JSON.end(body)


def open_json(content: bytes) -> Any:
    """The value; an object without its seal.

    Raises:
        SealBroken: it is not what was sealed, or no JSON.
    """
    sealed = _JSON.check(content)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SealBroken("it is not JSON") from error
    if sealed:
        del value["sealed"], value["xxh3"]
    return value


def seal_lines(content: bytes) -> bytes:
    """Lines of a file in which others are comments, sealed."""
    body = _LINES.begin + content
    return body + _LINES.end(body)


def is_sealed(content: bytes) -> bool:
    """Whether these lines are sealed, and whole.

    Raises:
        SealBroken: they are not what was sealed.
    """
    return _LINES.check(content)


PATIENCE_SECONDS = 2.0

_PAUSE_SECONDS = 0.02


def replace_file(
    new: Path,
    old: Path,
    patience_seconds: float = PATIENCE_SECONDS if sys.platform == "win32" else 0.0,
) -> None:
    """Rename `new` to `old`, which may exist; while that is refused, again for `patience_seconds`.

    Raises:
        OSError: it is refused still.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            new.replace(old)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
        else:
            return
        time.sleep(_PAUSE_SECONDS)  # no system says when a file is closed


def write_whole(path: Path, parts: Iterable[str | bytes]) -> None:
    """Write the file as a whole or not at all.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def where_links_lead(path: Path) -> Path:
    """The file behind symbolic links, which need not exist.

    Raises:
        OSError: the links lead to each other.
    """
    try:
        place = path.resolve()
    except RuntimeError:  # until Python 3.12; since then the loop is returned as it is
        place = path
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place
