"""The writer of `forms`: a form into the plain data that its reader takes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from p2ptrain.net.forms import By, Convert, Flat, Rare, Row, Text, declared, key_of, mark
from p2ptrain.net.read_form import one_line


def write_form(form: object) -> dict[str, Any]:
    """Plain data that `read` takes; None is left out where it is the default, others if `Rare`."""
    kind: Any = type(form)
    fields: dict[str, Any] = _fields_writer(kind)(form)
    return fields


@cache
def _fields_writer(form: type) -> Convert:
    fields: list[tuple[str, str, Convert | None, Any]] = []
    flat: list[tuple[str, Convert]] = []
    for field, hint, marks in declared(form):
        if mark(marks, Flat):
            flat.append((field.name, _fields_writer(hint)))
        else:
            may_lack = field.default is None or mark(marks, Rare) is not None
            left_out = field.default if may_lack else dataclasses.MISSING
            fields.append((field.name, key_of(field, marks), _writer(hint, marks), left_out))

    def write_fields(value: Any) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for name, writer in flat:
            said |= writer(getattr(value, name))
        for name, key, write_one, left_out in fields:
            item = getattr(value, name)
            if item is not left_out:
                said[key] = item if write_one is None or item is None else write_one(item)
        return said

    return write_fields


def _writer(hint: Any, marks: tuple[Any, ...] = ()) -> Convert | None:
    """What makes plain data of a value that is declared so and not None; None: it is plain."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _writer(inner[0], (*marks, *hint.__metadata__))
    if by := mark(marks, By):
        write_plain = _optional(_writer(by.of))
        return lambda value: write_plain(by.write(value))
    if origin in (Union, types.UnionType):
        left = [one for one in inner if one is not type(None)]
        return _writer(left[0], marks) if len(left) == 1 else _write_by_type
    if origin in (tuple, frozenset):
        return _writer_of_items(origin, inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        one = _optional(_writer(inner[1]))
        return lambda value: {key: one(item) for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value: value.value
    if dataclasses.is_dataclass(hint):
        return _writer_of_row(hint) if mark(marks, Row) else _fields_writer(hint)  # type: ignore[arg-type]
    if hint is float:
        return float
    text = mark(marks, Text)
    if hint is str and text is not None and text.clean:
        return lambda value: one_line(value[: text.most])
    return None


def _writer_of_items(kind: type, inner: tuple[Any, ...]) -> Convert:
    if kind is frozenset:
        one = _optional(_writer(inner[0]))
        return lambda value: [one(item) for item in sorted(value)]
    if inner[-1] is Ellipsis:
        one = _optional(_writer(inner[0]))
        return lambda value: [one(item) for item in value]
    each = [_optional(_writer(hint)) for hint in inner]
    return lambda value: [write_one(item) for write_one, item in zip(each, value, strict=True)]


def _writer_of_row(form: type) -> Convert:
    each = [(f.name, _optional(_writer(hint, marks))) for f, hint, marks in declared(form)]
    return lambda value: [write_one(getattr(value, name)) for name, write_one in each]


def _write_by_type(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return write_form(value) if dataclasses.is_dataclass(value) else value


def _optional(writer: Convert | None) -> Convert:
    if writer is None:
        return lambda value: value
    return lambda value: None if value is None else writer(value)
