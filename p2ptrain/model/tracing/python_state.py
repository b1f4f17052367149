"""What a model and its loss keep in Python: attributes, containers, helper objects, closures.

A trace runs them once and sees of all this only what it is at that time. So the state is noted
before a trace, compared after it, and restored. Of functions it includes closures, defaults,
attributes, and the globals that their code names: a loss is often a function of a script that calls
something which the script has made before.

Devices compute with what was read then. A data set or a callback that changes a global later (an
attribute, an entry of a dict) changes plain torch's curve and not theirs, without a word:
`Outdated` says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, bool, str, bytes)

_LEAVES = (*_PLAIN, types.NoneType, Tensor)

_PASSIVE = (types.SimpleNamespace, argparse.Namespace)

_CONTAINERS = (dict, list, set, deque)

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}

_OWN = frozenset({"p2ptrain", "builtins"})

_INSTALLED = ("site-packages", "dist-packages")

_CELL = "<cell>"
"""The only key of a closure's cell."""

_MAX_ITEMS = 10_000
"""Containers of more are data, such as vocabularies and samples: they are not looked into."""

_MAX_PLACES = 200_000

REGISTERS = ("_parameters", "_buffers", "_modules")

_USUALLY_EMPTY = frozenset(vars(nn.Module())) - frozenset(REGISTERS)
"""Of a module: hooks, which few models register in forward()."""


@dataclass(frozen=True, slots=True)
class PythonPlace:
    """Something that holds values.

    Attributes:
        path: how one gets there; "" for the model itself.
        owner: what it belongs to; a container belongs to itself.
        holder: a container, an object's `__dict__`, or a function's cell or globals.
        content: a copy of it.
    """

    path: str
    owner: object
    holder: Any
    content: Any

    def items(self) -> Iterator[tuple[Any, Any]]:
        """(key, value) as they were when the copy was made."""
        return _items(self.content)

    def changed(self) -> list[str]:
        """Paths of what is not what it was."""
        before, after = dict(self.items()), dict(_items(_copy(self.holder)))
        keys = (*before, *(key for key in after if key not in before))
        gone = object()
        return [
            joined_path(self.path, key)
            for key in keys
            if not _same(before.get(key, gone), after.get(key, gone))
        ]

    def put_back(self) -> None:
        """Make the holder what it was."""
        match self.holder:
            case list():
                self.holder[:] = self.content
            case deque():
                self.holder.clear()
                self.holder.extend(self.content)
            case Globals():
                self.holder.variables.update(self.content)
            case types.CellType():
                if self.content:
                    self.holder.cell_contents = self.content[_CELL]
            case types.MappingProxyType():
                self._put_back_attributes()
            case _:
                self.holder.clear()
                self.holder.update(self.content)

    def _put_back_attributes(self) -> None:
        """Of a class."""
        before, after = dict(self.items()), dict(self.holder)
        for name in before.keys() | after.keys():
            if name not in before:
                delattr(self.owner, name)
            elif not _same(before[name], after.get(name, self)):
                setattr(self.owner, name, before[name])


class PythonState:
    """What is kept in some roots, as it was."""

    def __init__(self, roots: Mapping[str, object], *, code: bool = False) -> None:
        """Note it.

        Args:
            roots: by the name that paths begin with.
            code: note too what methods of the user's classes read, and the attributes of those.
        """
        self.places = tuple(_places(roots, code=code))

    def changed(self) -> list[str]:
        """Paths of everything that is not what it was."""
        return [path for place in self.places for path in place.changed()]

    def put_back(self) -> None:
        """Make everything what it was. Tensors keep their values."""
        known = {id(place.holder) for place in self.places}
        for place in self.places:
            if place.changed():
                place.put_back()
            if isinstance(place.owner, nn.Module) and place.holder is place.owner.__dict__:
                _take_off_hooks(place.holder, known)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of every module, those in containers and closures too."""
        for place in self.places:
            if isinstance(place.owner, nn.Module):
                yield place.path, place.owner

    def values(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """(path, holder, key, value) of everything that was held."""
        for place in self.places:
            for key, value in place.items():
                yield joined_path(place.path, key), place.holder, key, value


def _take_off_hooks(attributes: dict[str, Any], known: set[int]) -> None:
    """Those of a module that had none: what says that they are on is put back too."""
    for name in _USUALLY_EMPTY:
        hooks = attributes.get(name)
        if isinstance(hooks, dict) and hooks and id(hooks) not in known:
            hooks.clear()


def joined_path(path: str, key: object) -> str:
    """The path of what `path` holds under `key`."""
    if key is _CELL:
        return path
    return ".".join(filter(None, (path, str(key))))


def current(holder: Any, key: Any) -> object:
    """What a place's holder has under `key` now; None if it has nothing."""
    if isinstance(holder, set | Globals | types.CellType):
        return dict(_items(holder)).get(key)
    try:
        return holder[key]
    except LookupError:
        return None


def _places(roots: Mapping[str, object], *, code: bool) -> Iterator[PythonPlace]:
    """Breadth first, everything once."""
    waiting = deque(roots.items())
    seen: dict[int, object] = {}
    while waiting and len(seen) < _MAX_PLACES:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        if _is_function(value):
            seen[id(value)] = value  # kept, so that its id stays its own
            for name, held in kept_by(value):
                if not code or not isinstance(held, Globals):
                    waiting.append((joined_path(path, name), held))
            if code and isinstance(value, types.FunctionType) and not is_installed(value):
                waiting.extend(_globals_read(value))
            continue
        if code and not isinstance(value, type):
            waiting.append((type(value).__name__, type(value)))
        holder = _holder(value)
        if holder is None and code and isinstance(value, type) and not is_installed(value):
            waiting.extend((base.__name__, base) for base in value.__bases__)
            holder = vars(value)
        if holder is None:
            continue
        seen[id(value)] = value
        place = PythonPlace(path, value, holder, _copy(holder))
        yield place
        waiting.extend(
            (_below(path, value, key), held)
            for key, held in place.items()
            if not isinstance(held, _LEAVES) and (key not in _USUALLY_EMPTY or held)
        )


def _globals_read(function: types.FunctionType) -> Iterator[tuple[str, Globals]]:
    """What its code names, of its own Python module and of the user's that it names."""
    names = Globals(function.__globals__, named_in(function))
    yield "", names
    for name, value in names.read().items():
        if isinstance(value, types.ModuleType) and not is_installed_module(value.__name__):
            yield name, Globals(vars(value), names.names)


def is_installed(value: object) -> bool:
    """Whether a class or function is of a library; what else there is belongs to the user."""
    made = getattr(value, "__module__", None)
    return isinstance(made, str) and is_installed_module(made)


def is_installed_module(name: str) -> bool:
    file = str(getattr(sys.modules.get(name), "__file__", None))
    first = name.partition(".")[0]
    return first in _LIBRARIES or first in _OWN or any(part in file for part in _INSTALLED)


def _is_function(value: object) -> bool:
    if isinstance(value, functools.partial | types.MethodType | property):
        return True
    if isinstance(value, staticmethod | classmethod):
        return True
    return isinstance(value, types.FunctionType) and not _of_library(value)


def _holder(value: object) -> Any:
    """Where `value` holds others; None if it is nothing that one looks into."""
    if isinstance(value, (*_CONTAINERS, tuple)):
        return value if len(value) <= _MAX_ITEMS else None
    if isinstance(value, Globals | types.CellType):
        return value
    if isinstance(value, type | types.ModuleType | types.FunctionType):
        return None
    own = isinstance(value, (nn.Module, *_PASSIVE)) or not _of_library(type(value))
    return getattr(value, "__dict__", None) if own else None


def _of_library(made: type | types.FunctionType) -> bool:
    return str(made.__module__).partition(".")[0] in _LIBRARIES


def _below(path: str, value: object, key: object) -> str:
    """A module's parts are called as torch calls them, without the dict that holds them."""
    registers = isinstance(value, nn.Module) and key in REGISTERS
    return path if registers else joined_path(path, key)


def _copy(holder: Any) -> Any:
    if isinstance(holder, Globals | types.CellType | types.MappingProxyType):
        return dict(_items(holder))
    for kind in _CONTAINERS:
        if isinstance(holder, kind):
            return kind(holder)
    return tuple(holder)


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Members of a set stand for themselves."""
    if isinstance(holder, dict | types.MappingProxyType):
        yield from holder.items()
    elif isinstance(holder, Globals):
        yield from holder.read().items()
    elif isinstance(holder, types.CellType):
        with contextlib.suppress(ValueError):  # a variable without a value yet
            yield _CELL, holder.cell_contents
    elif isinstance(holder, set):
        yield from ((member, member) for member in holder)
    else:
        yield from enumerate(holder)


def _same(one: object, other: object) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Globals:
    """Those global variables that a function's code names."""

    variables: dict[str, Any]
    names: tuple[str, ...]

    def read(self) -> dict[str, Any]:
        """Those that there are."""
        return {name: self.variables[name] for name in self.names if name in self.variables}


def kept_by(function: object) -> Iterator[tuple[str, object]]:
    """(name, what holds values) of a function, method, property or partial; nothing of others."""
    if isinstance(function, functools.partial):
        yield from (("", held) for held in (function.func, function.args, function.keywords))
    elif isinstance(function, property):
        yield "", function.fget
    elif isinstance(function, staticmethod | classmethod):
        yield "", function.__func__
    elif isinstance(function, types.MethodType):
        yield from (("", function.__self__), ("", function.__func__))
    elif isinstance(function, types.FunctionType):
        yield from zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        yield "", function.__dict__
        yield from (("", held) for held in (function.__defaults__, function.__kwdefaults__))
        yield "", Globals(function.__globals__, named_in(function))


def named_in(function: types.FunctionType) -> tuple[str, ...]:
    """Globals and attributes that its code names."""
    return tuple(dict.fromkeys(_names(function.__code__)))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


_COMPARED_BYTES = 2**20
"""Larger tensors are data: their values are not watched."""

_SWITCH = "training"
"""Of a module, which train() and eval() write: a callback may call them."""


class Outdated:
    """Of one captured model; to be made before anything of the user's runs again."""

    def __init__(self, module: nn.Module, loss: object) -> None:
        self._held = PythonState({"": module, "loss": loss}, code=True)
        registered = {
            id(tensor)
            for _, part in self._held.modules()
            for register in REGISTERS
            for tensor in part.__dict__[register].values()
        }
        self._values = [
            (path, holder, key, value.detach().clone())
            for path, holder, key, value in self._held.values()
            if isinstance(value, Tensor)
            and id(value) not in registered
            and value.nbytes <= _COMPARED_BYTES
        ]
        self._reported = set[str]()

    def news(self) -> list[str]:
        """Names of what has changed and was not named before."""
        changed = [path for path in self._held.changed() if path.split(".")[-1] != _SWITCH]
        changed += [
            path
            for path, holder, key, value in self._values
            if not _equal(current(holder, key), value)
        ]
        new = [path for path in dict.fromkeys(changed) if path not in self._reported]
        self._reported.update(new)
        return new


def _equal(now: Any, before: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and now.shape == before.shape
        and now.dtype == before.dtype
        and bool(torch.isclose(now.detach(), before, rtol=0, atol=0, equal_nan=True).all())
    )
