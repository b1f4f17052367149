"""The reader of `forms`: plain data into a form, or one error that names the place by its path.

A reader is made once for each form, of closures; a value that fits costs no path.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from p2ptrain.errors import Error, ProtocolError
from p2ptrain.net.forms import (
    LENGTH_LIMIT,
    TEXT_LIMIT_CHARACTERS,
    By,
    Convert,
    Flat,
    Length,
    Range,
    Row,
    Text,
    declared,
    is_required,
    is_shown,
    key_of,
    keys_of,
    mark,
    one_line,
)

T = TypeVar("T")


class _Wrong(Exception):
    """What does not fit; the path is put together on the way out, so that it costs nothing else."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why, self.path = why, ""

    def inside(self, place: str) -> _Wrong:
        self.path = place + self.path
        return self


def read_form(
    form: type[T],
    value: object,
    where: str,
    error: type[Error] = ProtocolError,
    *,
    extra: bool = False,
) -> T:
    """`value`, as decoded from CBOR or JSON, as a `form`.

    Args:
        where: what the value is, for the message of the error.
        error: what is raised where it does not fit.
        extra: further keys may stand beside the form's own.
    """
    hashable: Any = form
    read_fields: Callable[[object], T] = _fields_reader(hashable, extra)
    try:
        return read_fields(value)
    except _Wrong as wrong:
        raise error(f"{where}{wrong.path}: {wrong.why}") from None


def shown(value: object) -> str:
    """A wrong value in a few characters, without looking through all of a large one."""
    if isinstance(value, list | tuple | Mapping) and value:
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    if isinstance(value, str | bytes):
        return repr(value[:32]) + ("..." if len(value) > 32 else "")
    if type(value) is int and not -(2**64) < value < 2**64:
        return "a huge number"
    return repr(value)[:40]


@cache
def _fields_reader(form: type, extra: bool = False) -> Convert:
    plain: list[tuple[str, str, Convert, bool]] = []
    flat: list[tuple[str, Convert]] = []
    known: set[str] = set(getattr(form, "former_keys", ()))
    for field, hint, marks in declared(form):
        if mark(marks, Flat):
            flat.append((field.name, _fields_reader(hint, True)))
            known |= keys_of(hint)
            continue
        key = key_of(field, marks)
        plain.append((field.name, key, _reader(hint, marks), is_required(field)))
        known.add(key)

    def read_fields(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Wrong(f"expected an object, found {shown(value)}")
        if not extra and not known.issuperset(value):
            unknown = next(key for key in value if key not in known)
            names = ", ".join(sorted({key for _, key, _, _ in plain}))
            raise _Wrong(f"unknown field {_quoted(unknown)} (known: {names})")
        made = {name: reader(value) for name, reader in flat}
        for name, key, reader, required in plain:
            if key in value:
                try:
                    made[name] = reader(value[key])
                except _Wrong as wrong:
                    raise wrong.inside(f".{key}") from None
            elif required:
                raise _Wrong(f'the field "{key}" is missing')
        return _made(form, made)

    return read_fields


def _made(form: Callable[..., Any], fields: dict[str, Any]) -> Any:
    try:
        return form(**fields)
    except (Error, ValueError) as error:
        raise _placed(error, form) from None


def _placed(error: Exception, form: object) -> _Wrong:
    """An error that begins with a field's name, as in "units: none at all", is of that place."""
    field, _, why = str(error).partition(": ")
    if why and isinstance(form, type) and dataclasses.is_dataclass(form) and field in keys_of(form):
        return _Wrong(why).inside(f".{field}")
    return _Wrong(str(error))


def _quoted(key: object) -> str:
    return f'"{one_line(key[:40])}"' if isinstance(key, str) else shown(key)


def _reader(hint: Any, marks: tuple[Any, ...] = ()) -> Convert:
    """What checks a value that is declared so."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _reader(inner[0], (*marks, *hint.__metadata__))
    if by := mark(marks, By):
        return _reader_by(by)
    if origin in (Union, types.UnionType):
        return _reader_any([_reader(one, marks) for one in inner if one is not type(None)], inner)
    if origin is Literal:
        return _reader_of_values({one: one for one in inner})
    if origin in (tuple, frozenset):
        return _reader_of_items(origin, inner, marks)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        length = mark(marks, Length) or Length(LENGTH_LIMIT)
        return _reader_of_map(_reader(inner[0]), _reader(inner[1]), length)
    if hint is Any:
        return lambda value: value
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _reader_of_values({one.value: one for one in hint})
    if dataclasses.is_dataclass(hint):
        return _reader_of_row(hint) if mark(marks, Row) else _fields_reader(hint)  # type: ignore[arg-type]
    return _LEAVES[hint](marks)


def _reader_by(by: By) -> Convert:
    read_plain = _reader(by.of)

    def read_by(value: Any) -> Any:
        plain = read_plain(value)
        try:
            return by.read(plain)
        except (Error, ValueError) as error:
            raise _placed(error, by.of) from None

    return read_by


def _reader_any(readers: list[Convert], inner: tuple[Any, ...]) -> Convert:
    is_optional = type(None) in inner

    def read_any(value: Any) -> Any:
        if value is None and is_optional:
            return None
        for reader in readers[:-1]:
            try:
                return reader(value)
            except _Wrong:
                continue
        return readers[-1](value)

    return read_any


def _reader_of_values(known: Mapping[Any, Any]) -> Convert:
    def read_value(value: Any) -> Any:
        # Only a value of the very type: True is equal to 1, and a list cannot be looked up.
        if type(value) in (str, int) and value in known:
            return known[value]
        raise _Wrong(f"expected one of {', '.join(map(str, known))}, found {shown(value)}")

    return read_value


def _reader_of_items(kind: type, inner: tuple[Any, ...], marks: tuple[Any, ...]) -> Convert:
    if kind is frozenset or inner[-1] is Ellipsis:
        one, length = _reader(inner[0]), mark(marks, Length) or Length(LENGTH_LIMIT)
        return lambda value: kind(_read_all(value, length, lambda _: one))
    each = [_reader(hint) for hint in inner]
    return lambda value: tuple(_read_all(value, Length(len(each), len(each)), each.__getitem__))


def _reader_of_row(form: type) -> Convert:
    each = [(field.name, _reader(hint, marks)) for field, hint, marks in declared(form)]
    length = Length(len(each), len(each))

    def read_row(value: Any) -> Any:
        items = _read_all(value, length, lambda index: each[index][1])
        return _made(form, {name: item for (name, _), item in zip(each, items, strict=True)})

    return read_row


def _read_all(value: Any, length: Length, reader_at: Callable[[int], Convert]) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _Wrong(f"expected a list, found {shown(value)}")
    _check_length(value, length)
    items = []
    for index, item in enumerate(value):
        try:
            items.append(reader_at(index)(item))
        except _Wrong as wrong:
            raise wrong.inside(f"[{index}]") from None
    return items


def _reader_of_map(key_of: Convert, one: Convert, length: Length) -> Convert:
    def read_map(value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
            raise _Wrong(f"expected an object, found {shown(value)}")
        _check_length(value, length)
        items = {}
        for key, item in value.items():
            try:
                items[key_of(key)] = one(item)
            except _Wrong as wrong:
                raise wrong.inside(f"[{_quoted(key)}]") from None
        return items

    return read_map


def _check_length(value: Any, length: Length) -> None:
    if not length.least <= len(value) <= length.most:
        least = "" if length.least == length.most else f"{length.least} to "
        raise _Wrong(f"expected {least}{length.most} items, found {len(value)}")


def _reader_of_int(marks: tuple[Any, ...]) -> Convert:
    limit = mark(marks, Range) or Range()

    def read_int(value: Any) -> int:
        if type(value) is not int:
            raise _Wrong(f"expected a whole number, found {shown(value)}")
        return _in_range(value, limit)

    return read_int


def _reader_of_float(marks: tuple[Any, ...]) -> Convert:
    limit = mark(marks, Range) or Range(-math.inf, math.inf)

    def read_float(value: Any) -> float:
        if type(value) is int:
            if not -(2**64) < value < 2**64:
                raise _Wrong(f"expected a number, found {shown(value)}")
            return float(_in_range(value, limit))
        if type(value) is not float:
            raise _Wrong(f"expected a number, found {shown(value)}")
        if not math.isfinite(value):
            if limit.finite:
                raise _Wrong(f"expected a finite number, found {value}")
            return value
        return _in_range(value, limit)

    return read_float


def _in_range(value: T, limit: Range) -> T:
    if not limit.least <= value <= limit.most or (limit.above and value == limit.least):  # type: ignore[operator]
        bound = f"{'above' if limit.above else 'at least'} {limit.least:.12g}"
        if value > limit.most:  # type: ignore[operator]
            bound = f"at most {limit.most:.12g}"
        raise _Wrong(f"expected {bound}, found {shown(value)}")
    return value


def _reader_of_text(marks: tuple[Any, ...]) -> Convert:
    limit = mark(marks, Text) or Text(TEXT_LIMIT_CHARACTERS)
    fits = re.compile(limit.like, re.DOTALL).fullmatch if limit.like else None

    def read_text(value: Any) -> str:
        if not isinstance(value, str):
            raise _Wrong(f"expected a text, found {shown(value)}")
        if not limit.least <= len(value) <= limit.most:
            bounds = f"{limit.least} to {limit.most} characters"
            raise _Wrong(f"expected a text of {bounds}, found {shown(value)}")
        if fits is not None and not fits(value):
            raise _Wrong(f"expected a text like {limit.like}, found {shown(value)}")
        if value.isprintable():
            return str(value)
        if limit.clean:
            return one_line(value)
        if not all(map(is_shown, value)):
            raise _Wrong(f"{shown(value)} holds a control character")
        return str(value)

    return read_text


def _reader_of_bytes(marks: tuple[Any, ...]) -> Convert:
    limit = mark(marks, Length) or Length(LENGTH_LIMIT)

    def read_bytes(value: Any) -> bytes:
        if type(value) is not bytes:
            raise _Wrong(f"expected bytes, found {shown(value)}")
        _check_length(value, limit)
        return value

    return read_bytes


def _reader_of_bool(marks: tuple[Any, ...]) -> Convert:
    def read_bool(value: Any) -> bool:
        if type(value) is not bool:
            raise _Wrong(f"expected true or false, found {shown(value)}")
        return value

    return read_bool


_LEAVES: dict[Any, Callable[[tuple[Any, ...]], Convert]] = {
    int: _reader_of_int,
    float: _reader_of_float,
    str: _reader_of_text,
    bytes: _reader_of_bytes,
    bool: _reader_of_bool,
}
