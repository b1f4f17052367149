"""Forms: what a peer or a file may say, as frozen dataclasses whose annotations are the limits.

    @dataclass(frozen=True, slots=True)
    class Stock:
        device: Annotated[str, Text(64)]
        generation: Annotated[int, Range(0, 2**53)]
        linked: Annotated[tuple[str, ...], Length(256)] = ()
        kind: Kind | None = None                              # an Enum, by its value

    stock = read_form(Stock, cbor.loads(blob, LIMIT_BYTES), "stock")
    blob = cbor.dumps(write_form(stock))

A form declares int, float, str, bytes, bool, enums, dataclasses, `X | None`, `Literal`, tuples,
frozensets and mappings with text keys of these, and `Any` for plain data that is checked elsewhere.
Nothing is converted: True is no int, 1.0 neither, and NaN is no float. A value that does not fit is
one error, which names the place by its path. Unknown keys are refused, missing ones take defaults.

A form's `__post_init__` raises ValueError, or an error of ours, where its fields do not fit each
other; readers turn it into their error. It runs for forms made here too. A form whose older files
have keys that mean nothing any more names them in a class variable, `former_keys`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

LENGTH_LIMIT = 4096
"""Most items of a tuple, a set or a mapping that declares no `Length`."""

TEXT_LIMIT_CHARACTERS = 256
"""Longest text that declares no `Text`."""

T = TypeVar("T")

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Range:
    """Of a number: from `least` to `most`; with `above`, not `least` itself.

    An infinite or missing number passes only where `finite` is False.
    """

    least: float = -(2**63)
    most: float = 2**64 - 1
    above: bool = False
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Text:
    """Of a str: one line of at most `most` characters, and nothing that a terminal obeys.

    With `clean`, a text for users: what could not be shown is replaced, and not refused. With
    `like`, a regular expression that all of it fits.
    """

    most: int
    least: int = 0
    clean: bool = False
    like: str = ""


@dataclass(frozen=True, slots=True)
class Length:
    """Of bytes, a tuple, a frozenset or a mapping: how many."""

    most: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Key:
    """The field's key, where it is not its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Rare:
    """The field is left out where it is its default: False, None, "", (), or one of an enum."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Of a dataclass: its keys stand beside those of the form that holds it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of a dataclass: it travels as the list of its fields."""


@dataclass(frozen=True, slots=True)
class Local:
    """The field is neither read nor written: it keeps its default."""


@dataclass(frozen=True, slots=True)
class By:
    """Of any type: `read` makes it of a value that is declared as `of`, and `write` is its inverse.

    `read` raises our errors or ValueError.
    """

    read: Convert
    write: Convert
    of: Any = Any


Id: TypeAlias = Annotated[str, Text(64)]
"""Of a device, a job or a model."""

DeviceId: TypeAlias = Annotated[str, Text(64, 1, like="[ -~]+")]

Count: TypeAlias = Annotated[int, Range(0, 2**53)]

Positive: TypeAlias = Annotated[int, Range(1, 2**53)]

Bytes: TypeAlias = Annotated[int, Range(0, 2**63)]

Seconds: TypeAlias = Annotated[float, Range(0.0, math.inf)]

AboveZero: TypeAlias = Annotated[float, Range(0.0, math.inf, above=True)]


@cache
def declared(form: type) -> list[tuple[dataclasses.Field[Any], Any, tuple[Any, ...]]]:
    """Each field with its type and its marks; annotations are compiled once, before any error."""
    hints = get_type_hints(form, include_extras=True)
    found = []
    for field in dataclasses.fields(form):
        if field.init:
            hint = hints[field.name]
            marks = tuple(hint.__metadata__) if get_origin(hint) is Annotated else ()
            if mark(marks, Local):
                continue
            found.append((field, get_args(hint)[0] if marks else hint, marks))
    return found


def keys_of(form: type) -> set[str]:
    """Also of those whose keys stand beside its own."""
    keys: set[str] = set()
    for field, hint, marks in declared(form):
        keys |= keys_of(hint) if mark(marks, Flat) else {key_of(field, marks)}
    return keys


def key_of(field: dataclasses.Field[Any], marks: tuple[Any, ...]) -> str:
    """Of one field."""
    key = mark(marks, Key)
    return field.name if key is None else key.name


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether it has no default."""
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def mark(marks: tuple[Any, ...], kind: type[T]) -> T | None:
    """The first mark of that kind, if there is one."""
    return next((mark for mark in marks if isinstance(mark, kind)), None)


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


def one_line(text: str) -> str:
    """`text` for users: one line, without what would move a cursor or hide what follows."""
    if text.isprintable():
        return text
    return "".join(c if is_shown(c) else "?" for c in " ".join(text.split()))


def is_shown(character: str) -> bool:
    """Whether a terminal shows it, and neither obeys it nor turns what follows around."""
    category = unicodedata.category(character)
    return category[0] != "C" and category not in ("Zl", "Zp")
