"""`control.json`: where the running member listens for commands, and the token that opens it.

A program that can read this file (0600, in a 0700 folder) may command the member; no other can.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from p2ptrain.errors import UserError
from p2ptrain.mesh.state_folder import BrokenFile, StateFolder
from p2ptrain.net.forms import By, Count
from p2ptrain.net.write_form import write_form

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
        pid: of the member's process, for people.
    """

    address: Annotated[str, By(_read_path, str)]
    token: str
    pid: Count


def write_record(folder: Path, record: ControlRecord) -> None:
    """Put `record` into `folder` in one step, readable by its owner only. Raises UserError."""
    StateFolder(folder).write_json(RECORD_NAME, write_form(record))


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
