"""A node's arguments by the names of its operator's schema, defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._ops import OpOverload

from p2ptrain.model.effects import named_arguments
from p2ptrain.model.graph import Argument, Node
from p2ptrain.model.operators import resolve
from p2ptrain.model.tiles.refusal import NotTiled

Pair = tuple[int, int]
"""(rows, columns)."""


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments of a node that applies an ATen operator."""
    call = resolve(node.operator).call
    given: dict[str, Argument] = dict(named_arguments(node))
    if not isinstance(call, OpOverload):
        return dict(given)
    missing = (a for a in call._schema.arguments if a.name not in given)
    return {**given, **{a.name: a.default_value for a in missing if a.has_default_value()}}


def pair(arguments: Mapping[str, Any], name: str) -> Pair:
    """Two whole numbers; one stands for both.

    Raises:
        NotTiled: it is anything else.
    """
    value = arguments[name]
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if len(numbers) == 1:
        numbers = numbers * 2
    if len(numbers) != 2 or not all(type(number) is int for number in numbers):
        raise NotTiled(f"its {name} {value} is not one number an axis")
    return numbers[0], numbers[1]
