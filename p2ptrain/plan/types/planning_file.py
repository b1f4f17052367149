"""The files that users write by hand: a form beside its `format`, and the limits of its fields.

Unknown keys are refused, because a mistyped optional key ("slow_down") would otherwise be ignored
silently and the plan be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import Length, Range, Text, write_form
from p2ptrain.net.read_form import read_form, shown

T = TypeVar("T")

LARGEST_WHOLE = 2**63 - 1

MIN_ABOVE_ZERO = 1e-9
"""Of rates and slowdowns: dividing by less overflows."""

Name: TypeAlias = Annotated[str, Text(4096, 1)]

Whole: TypeAlias = Annotated[int, Range(0, LARGEST_WHOLE)]

WholeAboveZero: TypeAlias = Annotated[int, Range(1, LARGEST_WHOLE)]

Number: TypeAlias = Annotated[float, Range(0.0, LARGEST_WHOLE)]

Factor: TypeAlias = Annotated[float, Range(MIN_ABOVE_ZERO, LARGEST_WHOLE)]
"""What is divided by."""

MANY = Length(2**24)
"""Items of a list; the size of the file is the limit."""


def read_file(form: type[T], file_format: str, value: object, where: str) -> T:
    """The file's content; OptionError names the field that is missing or wrong."""
    if isinstance(value, Mapping):
        if value.get("format") != file_format:
            found = shown(value.get("format"))
            raise OptionError(f'{where}.format: expected "{file_format}", found {found}')
        value = {key: item for key, item in value.items() if key != "format"}
    return read_form(form, value, where, OptionError)


def write_file(form: object, file_format: str) -> dict[str, Any]:
    """What `read_file` takes."""
    return {"format": file_format, **write_form(form)}
