"""The numbers of an optimizer's groups as plain data: which there are, and which are usable.

Names, order and defaults are torch.optim's. Left out are arguments that make no sense across
devices: `differentiable`, `capturable` and numbers held in tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache

import torch

from p2ptrain.errors import OptionError
from p2ptrain.model.stage.optimizer_form import LOOPS, PlainColumns, Value

LARGEST = 1e30
"""Torch raises in the middle of an update where a number, or what it makes of it (Adam divides the
learning rate), does not fit into the parameters' float32."""

NAMES = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop"),
    *("Rprop", "ASGD", "Adafactor", "Muon"),
)
"""Of torch.optim's classes, those that act on each tensor by itself."""

_LEFT_OUT = frozenset({"self", "params", "differentiable", "capturable"})

_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "adjust_lr_fn": (None, "original", "match_rms_adamw")
}

_WHOLE = {"ns_steps": range(1, 100)}

_COUNTED = {2: "two", 3: "three"}


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
