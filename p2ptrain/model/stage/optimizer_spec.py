"""A travelling optimizer and torch: the classes that do, how they are checked and built.

The classes are those that treat each tensor by itself, so that the devices' parts together do what
one optimizer does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.stage.optimizer_form import OptimizerSpec, Value, plain_value
from p2ptrain.model.stage.optimizer_numbers import arguments_of, check_columns


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
