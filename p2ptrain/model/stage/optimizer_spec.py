"""A travelling optimizer and torch: the classes that do, how they are checked and built.

The classes are those that treat each tensor by itself, so that the devices' parts together do what
one optimizer does. Names, order and defaults of their numbers are torch.optim's. Left out are
arguments that make no sense across devices: `differentiable`, `capturable` and numbers held in
tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.stage.optimizer_form import (
    LOOPS,
    OptimizerSpec,
    PlainColumns,
    Value,
    plain_value,
)

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


def over(
    spec: OptimizerSpec, parts: Sequence[tuple[Mapping[str, Value], Sequence[torch.nn.Parameter]]]
) -> torch.optim.Optimizer:
    """The torch optimizer over some groups: the numbers and the parameters of each."""
    groups = [{"params": list(parameters), **numbers} for numbers, parameters in parts]
    made: Any = getattr(torch.optim, spec.name)
    optimizer: torch.optim.Optimizer = made(groups, **parts[0][0])
    return optimizer


def check(spec: OptimizerSpec) -> None:
    """Have every group's numbers checked, by torch in the end.

    Raises:
        OptionError: the class is none of ours, or refuses a number; names both.
    """
    check_columns(spec.name, spec.columns, spec.count)
    if spec.columns.keys() != arguments_of(spec.name).keys():
        raise OptionError(f"p2ptrain.{spec.name}: other arguments than torch's")
    for number in range(spec.count):
        try:
            over(spec, [(spec.group(number), [torch.nn.Parameter(torch.zeros(1, 1))])])
        except (ValueError, RuntimeError) as error:
            raise OptionError(f"p2ptrain.{spec.name}: {error}") from error


def received(spec: OptimizerSpec) -> OptimizerSpec:
    """A peer's, checked. The first call in a process may take a second, in torch.

    Raises:
        ProtocolError: it is unusable.
    """
    try:
        check(spec)
    except OptionError as error:
        raise ProtocolError(f"a peer sent an unusable optimizer: {error}") from error
    return spec


class _OneGroup(OptimizerSpec):
    """One group of all parameters, written with torch.optim's arguments.

    Raises:
        OptionError: torch would refuse them; names the argument.
    """

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.Signature(_parameters(cls.__name__))  # type: ignore[attr-defined]
        cls.__doc__ = f"torch.optim.{cls.__name__}'s arguments. Raises OptionError."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        _refuse_parameters(name, args[0] if args else kwargs.get("params"))
        try:
            bound = inspect.signature(type(self)).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"p2ptrain.{name}: {error}") from None
        bound.apply_defaults()
        columns = {key: (_plain_or_itself(value),) for key, value in bound.arguments.items()}
        super().__init__(name, columns)
        check(self)

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The class itself."""
        cls: type[torch.optim.Optimizer] = getattr(torch.optim, self.name)
        return cls

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`, in the order given."""
        return over(self, [(self.group(0), list(parameters))])

    def arguments(self) -> dict[str, Value]:
        """Keyword arguments for the torch.optim class of the same name."""
        return self.group(0)

    def __repr__(self) -> str:
        known = arguments_of(self.name)
        given = {k: v for k, v in self.arguments().items() if v != known[k].default}
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _parameters(name: str) -> list[inspect.Parameter]:
    """Torch's; those that stand behind one that is left out need their names."""
    taken = list(inspect.signature(getattr(torch.optim, name).__init__).parameters)[2:]
    found, known = [], arguments_of(name)
    for place, (key, parameter) in enumerate(known.items()):
        is_moved = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and taken[place] != key
        found.append(parameter.replace(kind=parameter.KEYWORD_ONLY) if is_moved else parameter)
    return found


def _plain_or_itself(value: object) -> Any:
    """What cannot travel is refused by its argument's name."""
    try:
        return plain_value(value)
    except ValueError:
        return value


def _refuse_parameters(name: str, given: object) -> None:
    is_number = hasattr(given, "__float__")
    if isinstance(given, Iterable) and not is_number and not isinstance(given, str):
        raise OptionError(
            f"p2ptrain.{name} takes no parameters and no groups of them: each device makes it for "
            "those that it gets, all with the same numbers. Leave out the first argument, or give "
            f"the Job torch.optim.{name}(...) itself, groups and all"
        )


class SGD(_OneGroup): ...


class Adam(_OneGroup): ...


class AdamW(_OneGroup): ...


class NAdam(_OneGroup): ...


class RAdam(_OneGroup): ...


class Adamax(_OneGroup): ...


class Adadelta(_OneGroup): ...


class Adagrad(_OneGroup): ...


class RMSprop(_OneGroup): ...


class Rprop(_OneGroup): ...


class ASGD(_OneGroup): ...


class Adafactor(_OneGroup): ...


class Muon(_OneGroup): ...
