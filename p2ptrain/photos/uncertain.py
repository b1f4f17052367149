"""`uncertain.json` in a folder of pictures: what an evaluation was least certain of.

A training writes it and the page reads it, so the two need no other way to each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from p2ptrain.errors import ProtocolError
from p2ptrain.files import write_whole
from p2ptrain.net.forms import Count, Length, Range, Text, write_form
from p2ptrain.net.read_form import read_form

UNCERTAIN_FILE = "uncertain.json"

UNCERTAIN_LIMIT = 200

_LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class UncertainPicture:
    """One picture of an evaluation.

    Attributes:
        label: its folder when the training began.
        file: its name there.
        guess: the label that the network finds likeliest.
        sure: how likely it finds the picture's own label, 0 to 1.
    """

    label: Annotated[str, Text(255)]
    file: Annotated[str, Text(255)]
    guess: Annotated[str, Text(255)]
    sure: Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class UncertainPictures:
    """The file.

    Attributes:
        step: updates after which it was found.
        evaluated: pictures looked at.
        pictures: the least certain first.
    """

    step: Count
    evaluated: Count
    pictures: Annotated[tuple[UncertainPicture, ...], Length(UNCERTAIN_LIMIT)]
    format: Literal["p2ptrain.uncertain/1"] = "p2ptrain.uncertain/1"


def write_uncertain(folder: Path, found: UncertainPictures) -> None:
    """Replace the file as a whole. Raises OSError."""
    write_whole(folder / UNCERTAIN_FILE, [json.dumps(write_form(found), indent=1)])


def read_uncertain(folder: Path) -> UncertainPictures | None:
    """What the last evaluation found; None before one, and where the file says something else."""
    file = folder / UNCERTAIN_FILE
    try:
        if file.is_symlink() or file.stat().st_size > _LIMIT_BYTES:
            return None
        return read_form(UncertainPictures, json.loads(file.read_bytes()), "uncertain.json")
    except (OSError, ValueError, RecursionError, ProtocolError):  # a person may have changed it
        return None
