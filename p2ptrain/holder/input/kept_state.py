"""What a data set keeps in Python, and whether that is still what it was.

Processes that read one epoch after the other give what new ones would only while a data set is at
its end what it was at its beginning. So what it holds is noted, and compared before the next epoch:
attributes, containers, arrays, generators of random numbers, closures, attributes of the user's
classes, and globals that its code names. What cannot be looked into counts as changed.
"""

from __future__ import annotations

import datetime
import enum
import functools
import itertools
import logging
import operator
import pathlib
import random
import re
import threading
import types
import typing
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

from p2ptrain.model.tracing.python_state import (
    Globals,
    is_installed,
    is_installed_module,
    kept_by,
)

MOST_PLACES = 50_000
"""Containers, objects and functions that are looked into, which takes a second at most."""

LARGE_BYTES = 16 << 20
"""Of a tensor: that it is changed is counted by torch, and its values are not read."""

MOST_BYTES = 1 << 30
"""Of arrays whose contents are compared."""

_ATOMS = (
    *(types.NoneType, bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)),
    *(numpy.generic, numpy.dtype, torch.dtype, torch.device, torch.Size, torch.layout),
    *(pathlib.PurePath, enum.Enum, re.Pattern, logging.Logger, datetime.date, datetime.timedelta),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType),
    *(type(threading.Lock()), type(threading.RLock())),
    *(types.GenericAlias, types.UnionType, typing.TypeVar, typing.ParamSpec),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
)
"""Nothing in them changes, or nothing that samples hang on."""

_PLAIN = frozenset({types.NoneType, bool, int, float, complex, str, bytes})

_FUNCTIONS = (
    *(types.FunctionType, types.MethodType, property, staticmethod, classmethod),
    functools.partial,
)

_STATES: dict[type, Callable[[Any], Any]] = {
    random.Random: lambda one: one.getstate(),
    numpy.random.Generator: lambda one: one.bit_generator.state,
    numpy.random.BitGenerator: lambda one: one.state,
    numpy.random.RandomState: lambda one: one.get_state(legacy=False),
    torch.Generator: lambda one: one.get_state().numpy().tobytes(),
}


class _Opaque(Exception):
    """Something that cannot be looked into, or there is too much."""


class KeptState:
    """What some roots keep, as it was when this was made."""

    def __init__(self, *roots: object) -> None:
        self._held: list[tuple[object, Callable[[object], Any], Any]] = []
        self._seen: dict[int, object] = {}
        self._bytes = 0
        self._roots = roots
        try:
            self._note_all(roots)
            self._is_known = True
        except (_Opaque, RecursionError):
            self._is_known = False

    def is_unchanged(self) -> bool:
        """Whether all of it is certainly what it was."""
        return self._is_known and all(
            _same(read(holder), before) for holder, read, before in self._held
        )

    def _note_all(self, roots: tuple[object, ...]) -> None:
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            if len(self._seen) > MOST_PLACES:
                raise _Opaque
            self._seen[id(value)] = value  # kept, so that its id stays its own
            waiting.extend(self._noted(value))

    def _noted(self, value: Any) -> Iterator[object]:
        """Note what it holds; gives what of that may hold something."""
        if isinstance(value, types.ModuleType):
            return iter(())
        if isinstance(value, Tensor):
            return self._array(value, _tensor_values)
        if isinstance(value, numpy.ndarray) and value.dtype.kind != "O":
            return self._array(value, _array_values) if value.flags.writeable else iter(())
        for kind, state in _STATES.items():
            if isinstance(value, kind):
                return self._read(value, state)
        if isinstance(value, _FUNCTIONS):
            return self._of_function(value)
        if isinstance(value, Globals):
            return self._read(value, _dict_items)
        if isinstance(value, types.CellType):
            return self._read(value, _cell_items)
        if isinstance(value, type):
            if is_installed(value):
                return iter(())
            return itertools.chain(self._read(value, _attributes), value.__bases__)
        return self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[object]:
        made = type(value)
        kinds = [kind for kind in _ITEMS if isinstance(value, kind)]
        slots = [name for base in made.__mro__ for name in _slots(base) if name[:2] != "__"]
        has_dict = hasattr(value, "__dict__")
        if not kinds and not (_is_python(made) and (slots or has_dict)):
            return self._in_its_own_words(value)
        found: list[Iterator[object]] = [iter((made,))]
        if kinds:
            found.append(self._read(value, _ITEMS[kinds[0]]))
        if slots:
            found.append(self._read(value, lambda one: [getattr(one, n, None) for n in slots]))
        if has_dict:
            found.append(self._read(value.__dict__, _dict_items))
        return itertools.chain(*found)

    def _in_its_own_words(self, value: Any) -> Iterator[object]:
        """What is written in another language says what it holds, or nothing is known."""
        if type(value) is object:
            return iter(())
        if getattr(type(value), "__getstate__", None) in (None, _STATELESS):
            raise _Opaque
        return self._read(value, lambda one: one.__getstate__())

    def _of_function(self, value: Any) -> Iterator[object]:
        if isinstance(value, types.FunctionType) and is_installed(value):
            return iter(value.__closure__ or ())
        held = [one for _, one in kept_by(value)]
        for names in [one for one in held if isinstance(one, Globals)]:
            modules = [one for one in names.read().values() if isinstance(one, types.ModuleType)]
            held += [
                Globals(vars(one), names.names)
                for one in modules
                if not is_installed_module(one.__name__)
            ]
        return iter(held)

    def _read(self, value: Any, read: Callable[[Any], Any]) -> Iterator[object]:
        try:
            before = read(value)
        except Exception as error:  # whatever the user's classes raise
            raise _Opaque from error
        self._held.append((value, read, before))
        return _children(before)

    def _array(self, value: Any, read: Callable[[Any], Any]) -> Iterator[object]:
        self._bytes += value.nbytes if read is _array_values else 0
        if self._bytes > MOST_BYTES:
            raise _Opaque
        return self._read(value, read)


def _children(values: Any) -> Iterator[object]:
    """Those that may hold something: of many plain values none is looked at."""
    if not isinstance(values, list | tuple):
        return iter(())
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return iter(())
    if kinds == {tuple} and set(map(type, itertools.chain.from_iterable(values))) <= _PLAIN:
        return iter(())
    return iter(values)


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, list | tuple) and type(now) is type(before):
        if len(now) != len(before):
            return False
        if all(map(operator.is_, now, before)):
            return True
        return all(map(_same, now, before))
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(before, numpy.ndarray):
        return bool(numpy.array_equal(now, before))
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(_same(now[key], before[key]) for key in before)
    return isinstance(before, tuple(_PLAIN)) and bool(now == before)


def _dict_items(value: Any) -> list[object]:
    items = value.read() if isinstance(value, Globals) else value
    return [*items.keys(), *items.values()]


def _cell_items(value: types.CellType) -> list[object]:
    try:
        return [value.cell_contents]
    except ValueError:  # a variable without a value yet
        return []


def _attributes(value: type) -> list[object]:
    """Those of the user's, and methods."""
    return [
        one
        for name, one in vars(value).items()
        if name != "_abc_impl" and (not name.startswith("__") or isinstance(one, _FUNCTIONS))
    ]


def _is_python(made: type) -> bool:
    """Whether all that its objects hold stands in attributes."""
    new: object = made.__new__
    is_own = isinstance(new, types.FunctionType) or issubclass(made, types.SimpleNamespace)
    return is_own or new is object.__new__


_STATELESS = getattr(object, "__getstate__", None)

_ITEMS: dict[type, Callable[[Any], list[object]]] = {
    dict: _dict_items,
    **dict.fromkeys((list, tuple, set, frozenset, deque), list),
}


def _slots(base: type) -> tuple[str, ...]:
    found = vars(base).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _tensor_values(value: Tensor) -> tuple[object, ...]:
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise _Opaque
    if value.nbytes > LARGE_BYTES:
        return tuple(value.shape), str(value.dtype), value.data_ptr(), value._version
    plain = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(value.shape), str(value.dtype), zlib.crc32(plain.numpy().data)


def _array_values(value: numpy.ndarray[Any, Any]) -> tuple[object, ...]:
    plain = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    return value.shape, str(value.dtype), zlib.crc32(plain.data)
