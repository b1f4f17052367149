"""What apps give as options, taken for what it means or refused; nothing is converted by force."""

from __future__ import annotations

import operator
from enum import StrEnum
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import SupportsIndex, TypeVar

from p2ptrain.errors import OptionError

Choice = TypeVar("Choice", bound=StrEnum)

MOST_THREADS = 1024
"""That a device computes with: where torch cannot start them all, it may take the process along."""


def path(name: str, value: str | PathLike[str] | None) -> Path | None:
    """OptionError names the option."""
    try:
        return None if value is None else Path(value)
    except TypeError:
        raise OptionError(f"{name} must be a path, not {value!r}") from None


def whole(name: str, value: SupportsIndex | None) -> int | None:
    """The same of a whole number, NumPy's too."""
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def seconds(name: str, value: object) -> float | None:
    """The same of a length of time."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not value >= 0:  # NaN is no length
        raise OptionError(f"{name} must be 0 seconds or more, not {value!r}")
    return value


def choice(choices: type[Choice], name: str, value: str) -> Choice:
    """The same of one of a few words."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise OptionError(f"{name} must be one of {known}, not {value!r}") from None


def grid(value: object) -> tuple[int, int] | None:
    """(rows, columns), where there is one."""
    if value is None:
        return None
    numbers = _wholes(value)
    if len(numbers) != 2 or min(numbers) < 1:
        raise OptionError(f"grid is (rows, columns), from 1 on, found {value!r}")
    return numbers[0], numbers[1]


def borders(value: object) -> tuple[int, ...]:
    """Of groups of units: none, or numbers that rise from 0 and have an end."""
    numbers = _wholes(value)
    is_none = isinstance(value, list | tuple) and not value
    rises = all(first < end for first, end in pairwise(numbers))
    if not is_none and (len(numbers) < 2 or numbers[0] != 0 or not rises):
        raise OptionError(
            f"groups are borders of units, rising from 0, as (0, 4, 10): found {value!r}"
        )
    return numbers


def _wholes(value: object) -> tuple[int, ...]:
    """Empty where it is no list of whole numbers."""
    given = value if isinstance(value, list | tuple) else ()
    return tuple(given) if all(type(number) is int for number in given) else ()
