"""What of an optimizer travels: the name of a class of torch.optim, and the numbers of its groups.

torch.optim.AdamW([{"params": two}, {"params": one, "weight_decay": 0.0}], lr=3e-4)
    "AdamW"   lr 3e-4   weight_decay 0.01, 0.0   ...   the trained tensors: 0 1 0 1 1 ...
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from p2ptrain.errors import ProtocolError
from p2ptrain.net.forms import By, Length, Range, Text, write_form

GROUPS_LIMIT = 1024

LOOPS = ("foreach", "fused")
"""Torch's faster loops over tensors; None where torch chooses."""

_MOST_ITEMS = 3
"""Of a number that is several."""

Number: TypeAlias = bool | int | float | str | None

Value: TypeAlias = Number | tuple[Number, ...]

PlainColumns: TypeAlias = Mapping[str, tuple[Value, ...]]


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
        ema: decay of an average of the trained tensors that is kept beside them; None = none is.
    """

    name: Annotated[str, Text(32)]
    columns: Columns
    count: Annotated[int, Range(1, GROUPS_LIMIT)] = 1
    members: Annotated[bytes, Length(2 * PARAMETERS_LIMIT)] = b""
    ema: Annotated[float, Range(0.0, 1.0)] | None = None

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
