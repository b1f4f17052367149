"""Strict reading of JSON files that users write by hand: every error names the field by its path.

Unknown keys are refused, because a mistyped optional key ("slow_down") would otherwise be ignored
silently and the plan be wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection

from p2ptrain.errors import OptionError
from p2ptrain.net.read_form import is_shown, one_line, shown

LARGEST_WHOLE = 2**63 - 1

MIN_ABOVE_ZERO = 1e-9
"""Of rates and slowdowns: dividing by less overflows."""

LARGEST = sys.float_info.max
"""Of what is computed from other numbers, and so may be larger than any of them."""


def members(
    value: object, where: str, required: Collection[str], optional: Collection[str] = ()
) -> dict[str, object]:
    """The object's members, exactly those named; OptionError where one is missing or unknown."""
    if not isinstance(value, dict):
        raise OptionError(f"{where}: expected an object, found {shown(value)}")
    for key in required:
        if key not in value:
            raise OptionError(f'{where}: the field "{key}" is missing')
    for key in value:
        if key not in required and key not in optional:
            known = ", ".join(sorted([*required, *optional]))
            raise OptionError(f'{where}: unknown field "{one_line(key[:40])}" (known: {known})')
    return value


def items(value: object, where: str) -> list[object]:
    """The list's items."""
    if not isinstance(value, list):
        raise OptionError(f"{where}: expected a list, found {shown(value)}")
    return value


def text(value: object, where: str) -> str:
    """A text that is not empty and can be shown on one line."""
    if not isinstance(value, str) or not value:
        raise OptionError(f"{where}: expected a text, found {shown(value)}")
    if not value.isprintable() and not all(map(is_shown, value)):
        raise OptionError(f"{where}: {shown(value)} holds a control character")
    return value


def truth(value: object, where: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{where}: expected true or false, found {shown(value)}")
    return value


def number(
    value: object, where: str, *, above_zero: bool = False, most: float = LARGEST_WHOLE
) -> float:
    """A finite number from zero up to `most`; with `above_zero`, not zero either."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{where}: expected a number, found {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{where}: expected a finite number, found {shown(value)}")
    if value < 0 or (above_zero and value < MIN_ABOVE_ZERO):
        bound = f"above zero (at least {MIN_ABOVE_ZERO:g})" if above_zero else "zero or more"
        raise OptionError(f"{where}: expected a number {bound}, found {shown(value)}")
    if value > most:
        bound = f"of at most {most:.2g}"
        raise OptionError(f"{where}: expected a finite number {bound}, found {shown(value)}")
    return float(value)


def whole(value: object, where: str, *, least: int = 0) -> int:
    """A whole number of at least `least`; 4e9 counts as whole."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{where}: expected a whole number, found {shown(value)}")
    if isinstance(value, float) and not value.is_integer():
        raise OptionError(f"{where}: expected a whole number, found {shown(value)}")
    if value < least:
        raise OptionError(f"{where}: expected at least {least}, found {shown(value)}")
    if value > LARGEST_WHOLE:
        raise OptionError(f"{where}: expected at most {LARGEST_WHOLE:.2g}, found {shown(value)}")
    return int(value)


def file_format(value: object, where: str, expected: str) -> None:
    """Check the "format" field of a whole file before anything else is read."""
    if not isinstance(value, dict):
        raise OptionError(f"{where}: expected an object, found {shown(value)}")
    if value.get("format") != expected:
        found = shown(value.get("format"))
        raise OptionError(f'{where}.format: expected "{expected}", found {found}')
