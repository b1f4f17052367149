"""Putting a file in the place of another, as a whole.

Windows refuses that while any process has the other file open, such as a virus scanner or a reader
of ours, for a few milliseconds as a rule.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

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
