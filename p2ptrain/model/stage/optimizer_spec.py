"""What of an optimizer travels: the name of a class of torch.optim, and the numbers of its groups.

    torch.optim.AdamW([{"params": two}, {"params": one, "weight_decay": 0.0}], lr=3e-4)
        "AdamW"   lr 3e-4   weight_decay 0.01, 0.0   ...   the trained tensors: 0 1 0 1 1 ...

The classes are those that treat each tensor by itself, so that the devices' parts together do what
one optimizer does.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from p2ptrain.errors import OptionError, ProtocolError
from p2ptrain.model.stage.optimizer_numbers import (
    GROUPS_LIMIT,
    LOOPS,
    Columns,
    PlainColumns,
    Value,
    arguments_of,
    check_columns,
    columns_of,
    in_group,
    plain_value,
)
from p2ptrain.net.forms import Length, Range, Text
from p2ptrain.net.write_form import write_form

PARAMETERS_LIMIT = 65_536


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """See the module.

    Attributes:
        name: of the class.
        columns: every argument's numbers.
        count: of groups.
        members: the group of each trained tensor, two bytes each, in the order of the model's
            description; empty where there is one group.
    """

    name: Annotated[str, Text(32)]
    columns: Columns
    count: Annotated[int, Range(1, GROUPS_LIMIT)] = 1
    members: Annotated[bytes, Length(2 * PARAMETERS_LIMIT)] = b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptimizerSpec) and write_form(self) == write_form(other)

    def __hash__(self) -> int:
        return hash((self.name, self.members))

    @staticmethod
    def of(name: str, groups: list[dict[str, Value]], members: Sequence[int]) -> OptimizerSpec:
        """One of groups that have a value for every argument.

        Args:
            members: the group of each trained tensor, in the order of the model's description.
        """
        packed = struct.pack(f"<{len(members)}H", *members) if len(groups) > 1 else b""
        return OptimizerSpec(name, columns_of(groups), len(groups), packed)

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The class itself."""
        cls: type[torch.optim.Optimizer] = getattr(torch.optim, self.name)
        return cls

    @property
    def uses_loops(self) -> bool:
        """Whether torch's faster loops are asked for."""
        return any(any(self.columns.get(loop, ())) for loop in LOOPS)

    def group(self, number: int, changes: PlainColumns | None = None) -> dict[str, Value]:
        """The numbers of one group.

        Args:
            changes: what a schedule makes of some of them.
        """
        return in_group({**self.columns, **(changes or {})}, number)

    def group_of(self, trained: Sequence[str]) -> dict[str, int]:
        """The group of each of the model's trained tensors, whose names are in its order.

        Raises:
            ProtocolError: it is of another model.
        """
        if self.count == 1:
            return dict.fromkeys(trained, 0)
        fits = len(self.members) == 2 * len(trained)
        numbers = struct.unpack(f"<{len(trained)}H", self.members) if fits else ()
        if not fits or max(numbers, default=0) >= self.count:
            raise ProtocolError("the optimizer's groups are of another model")
        return dict(zip(trained, numbers, strict=True))

    def check(self) -> None:
        """Have every group's numbers checked, by torch in the end.

        Raises:
            OptionError: the class is none of ours, or refuses a number; names both.
        """
        check_columns(self.name, self.columns, self.count)
        if self.columns.keys() != arguments_of(self.name).keys():
            raise OptionError(f"p2ptrain.{self.name}: other arguments than torch's")
        for number in range(self.count):
            try:
                self.over([(self.group(number), [torch.nn.Parameter(torch.zeros(1, 1))])])
            except (ValueError, RuntimeError) as error:
                raise OptionError(f"p2ptrain.{self.name}: {error}") from error

    def over(
        self, parts: Sequence[tuple[Mapping[str, Value], Sequence[torch.nn.Parameter]]]
    ) -> torch.optim.Optimizer:
        """The torch optimizer over some groups: the numbers and the parameters of each."""
        groups = [{"params": list(parameters), **numbers} for numbers, parameters in parts]
        made: Any = self.torch_class
        optimizer: torch.optim.Optimizer = made(groups, **parts[0][0])
        return optimizer

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer of one group over `parameters`, in the order given."""
        return self.over([(self.group(0), list(parameters))])


def received(spec: OptimizerSpec) -> OptimizerSpec:
    """A peer's, checked. The first call in a process may take a second, in torch.

    Raises:
        ProtocolError: it is unusable.
    """
    try:
        spec.check()
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
        self.check()

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
