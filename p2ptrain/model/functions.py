"""What a function keeps: closures, defaults, attributes, and the globals that its code names.

A loss is often a function of a script that calls something which the script has made before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


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
