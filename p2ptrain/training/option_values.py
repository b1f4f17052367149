"""What apps give as options, taken for what it means or refused; nothing is converted by force."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import SupportsIndex, TypeGuard, TypeVar

from p2ptrain.errors import OptionError

Choice = TypeVar("Choice", bound=StrEnum)


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


def choice(choices: type[Choice], name: str, value: str) -> Choice:
    """The same of one of a few words."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choices)
        raise OptionError(f"{name} must be one of {known}, not {value!r}") from None


def is_grid(value: object) -> bool:
    """Whether it is (rows, columns)."""
    return _are_wholes(value) and len(value) == 2 and min(value) >= 1


def are_borders(value: object) -> bool:
    """Whether it rises from 0, and has an end."""
    return _are_wholes(value) and len(value) > 1 and value[0] == 0 and _rise(value)


def _rise(numbers: Sequence[int]) -> bool:
    return all(first < end for first, end in pairwise(numbers))


def _are_wholes(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and all(type(number) is int for number in value)
