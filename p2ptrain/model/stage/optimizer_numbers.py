"""The numbers of an optimizer's groups as plain data: which there are, and which are usable.

Names, order and defaults are torch.optim's. Left out are arguments that make no sense across
devices: `differentiable`, `capturable` and numbers held in tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import torch

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By

LARGEST = 1e30
"""Torch raises in the middle of an update where a number, or what it makes of it (Adam divides the
learning rate), does not fit into the parameters' float32."""

GROUPS_LIMIT = 1024

NAMES = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop"),
    *("Rprop", "ASGD", "Adafactor", "Muon"),
)
"""Of torch.optim's classes, those that act on each tensor by itself."""

LOOPS = ("foreach", "fused")
"""Torch's faster loops over tensors; None where torch chooses."""

_LEFT_OUT = frozenset({"self", "params", "differentiable", "capturable"})

_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "adjust_lr_fn": (None, "original", "match_rms_adamw")
}

_WHOLE = {"ns_steps": range(1, 100)}

_MOST_ITEMS = 3
"""Of a number that is several."""

_COUNTED = {2: "two", 3: "three"}

Number: TypeAlias = bool | int | float | str | None

Value: TypeAlias = Number | tuple[Number, ...]

PlainColumns: TypeAlias = Mapping[str, tuple[Value, ...]]


@cache
def arguments_of(name: str) -> Mapping[str, inspect.Parameter]:
    """What torch.optim's class of that name takes, but for `params` and what is left out here.

    Raises:
        OptionError: there is none, or it is none of `NAMES`.
    """
    cls = getattr(torch.optim, name, None) if name in NAMES else None
    if cls is None:
        raise OptionError(f"the optimizer {name!r} is none of {', '.join(NAMES)}")
    taken = inspect.signature(cls.__init__).parameters
    return {key: parameter for key, parameter in taken.items() if key not in _LEFT_OUT}


def plain_value(value: object) -> Value:
    """A number, switch or word as it travels; lists become tuples. Raises ValueError."""
    if not isinstance(value, (tuple, list)):
        return _plain_number(value)
    if len(value) > _MOST_ITEMS:
        raise ValueError(f"{len(value)} numbers instead of one")
    return tuple(map(_plain_number, value))


def _plain_number(value: object) -> Number:
    if value is None or type(value) in (bool, int, float):
        return value  # type: ignore[return-value]
    if isinstance(value, float):  # numpy's
        return float(value)
    if isinstance(value, str) and len(value) <= 32:
        return value
    raise ValueError(f"{type(value).__name__} is no number of an optimizer")


def _read_columns(value: object) -> PlainColumns:
    if not isinstance(value, Mapping) or len(value) > 32:
        raise ValueError("expected an optimizer's numbers")
    found: dict[str, tuple[Value, ...]] = {}
    for name, column in value.items():
        if type(name) is not str or not isinstance(column, (list, tuple)):
            raise ValueError("expected the numbers of groups, by name")
        if not 1 <= len(column) <= GROUPS_LIMIT:
            raise ValueError(f"{len(column)} groups")
        found[name] = tuple(map(plain_value, column))
    return found


def _write_columns(columns: PlainColumns) -> dict[str, list[Any]]:
    return {
        name: [list(one) if isinstance(one, tuple) else one for one in column]
        for name, column in columns.items()
    }


Columns: TypeAlias = Annotated[PlainColumns, By(_read_columns, _write_columns)]
"""An argument's name -> its value in each group, or one value for all of them."""

AS_GIVEN: PlainColumns = MappingProxyType({})
"""No schedule changes a number."""


def columns_of(groups: list[dict[str, Value]]) -> PlainColumns:
    """The columns of groups that all have the same numbers."""
    columns: dict[str, tuple[Value, ...]] = {}
    for key in groups[0]:
        column = tuple(group[key] for group in groups)
        same = all(one == column[0] and type(one) is type(column[0]) for one in column)
        columns[key] = column[:1] if same else column
    return columns


def in_group(columns: PlainColumns, number: int) -> dict[str, Value]:
    """The numbers of one group."""
    return {key: column[number if len(column) > 1 else 0] for key, column in columns.items()}


def check_columns(name: str, columns: PlainColumns, groups: int) -> None:
    """Whether they are numbers of that class and so many groups, each usable by itself.

    Raises:
        OptionError: names what is not.
    """
    known = arguments_of(name)
    for key, column in columns.items():
        if key not in known or len(column) not in (1, groups):
            raise OptionError(f"p2ptrain.{name}: {key[:32]!r} is no number of its groups")
        for value in column:
            why = _refused(key, known[key].default, value)
            if why:
                raise OptionError(f"p2ptrain.{name}: {key} must be {why}, not {shown(value)}")


def _refused(key: str, default: object, value: Value) -> str:
    """What the value must be and is not; "" where it is usable."""
    if key in LOOPS or isinstance(default, bool):
        ok, wanted = isinstance(value, bool) or (value is None and key in LOOPS), "a bool"
    elif key in _CHOICES:
        ok, wanted = value in _CHOICES[key], f"one of {_CHOICES[key]}"
    elif isinstance(default, tuple):
        wanted = f"{_COUNTED[len(default)]} finite numbers"
        ok = isinstance(value, tuple) and len(value) == len(default)
        if isinstance(value, tuple) and ok:
            pairs = zip(value, default, strict=True)
            ok = all(is_number(one) or (one is None and usual is None) for one, usual in pairs)
    elif key in _WHOLE:
        ok = isinstance(value, int) and value in _WHOLE[key] and not isinstance(value, bool)
        wanted = f"a whole number from {_WHOLE[key][0]} to {_WHOLE[key][-1]}"
    else:
        ok = is_number(value)
        wanted = f"a finite number, {LARGEST:.0e} at most"
    return "" if ok else wanted


def is_number(value: object) -> bool:
    """Whether an optimizer can compute with it."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= LARGEST  # not NaN, and whole numbers of any length can be compared


def shown(value: object) -> str:
    """A wrong number, for an error."""
    try:
        return repr(value)
    except ValueError:  # a whole number of more than 4300 digits, which a peer may well send
        return f"this {type(value).__name__}"
