"""A model as data: nodes that each apply one named operator to earlier values.

It is what `torch.export` produces, without the Python: operator names, not functions. See
`operators` for the names that may occur, and `stage/program.py` for how a graph is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from p2ptrain.model.graph.values import Polynomial, ValueDescription


@dataclass(frozen=True, slots=True)
class InputRef:
    """The model's input leaf of that index."""

    index: int


@dataclass(frozen=True, slots=True)
class TargetRef:
    """The loss target's leaf of that index."""

    index: int


@dataclass(frozen=True, slots=True)
class StateRef:
    """The parameter, buffer or constant of that canonical name."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeRef:
    """The result of the node of that index in the same graph."""

    index: int


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """The backward of a `torch.autograd.Function`, as the argument of the node that applies it.

    Attributes:
        nodes: each refers to earlier ones of these, or to what the backward is given: as inputs
            first the gradients that arrive, then what the node keeps for it.
        gradients: what it gives, one for each input that takes a gradient; None = no gradient.
    """

    nodes: tuple[GraphNode, ...]
    gradients: tuple[InputRef | NodeRef | None, ...]


Reference: TypeAlias = InputRef | TargetRef | StateRef | NodeRef

Scalar: TypeAlias = int | float | complex | bool | str | None

Argument: TypeAlias = (
    Reference
    | Polynomial
    | Scalar
    | torch.dtype
    | torch.memory_format
    | torch.layout
    | torch.device
    | BackwardGraph
    | tuple["Argument", ...]
)
"""A `Polynomial` stands for the whole number it gives for the batch at hand."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One application of an operator.

    Attributes:
        name: an identifier, unique in its graph.
        operator: such as "aten.linear.default"; see `operators`.
        args: positional arguments.
        kwargs: keyword arguments, in order.
        grad_enabled: False inside the user's `torch.no_grad()`.
    """

    name: str
    operator: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    grad_enabled: bool

    def references(self) -> Iterator[Reference]:
        """Every value this node reads, in order of its arguments, repeated where repeated."""
        for argument in self.args:
            yield from references_in(argument)
        for _, argument in self.kwargs:
            yield from references_in(argument)

    def reading(self, other: Callable[[Reference], Reference]) -> GraphNode:
        """The same node with `other` of each of its references in its place."""
        args = tuple(_reading(argument, other) for argument in self.args)
        kwargs = tuple((name, _reading(argument, other)) for name, argument in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)


def references_in(argument: Argument) -> Iterator[Reference]:
    """The references inside one argument; not those in a backward, which are not of its graph."""
    if isinstance(argument, tuple):
        for item in argument:
            yield from references_in(item)
    elif isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
        yield argument


def _reading(argument: Argument, other: Callable[[Reference], Reference]) -> Argument:
    if isinstance(argument, tuple):
        return tuple(_reading(item, other) for item in argument)
    if isinstance(argument, InputRef | TargetRef | StateRef | NodeRef):
        return other(argument)
    return argument


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they run.

    Attributes:
        nodes: each refers to earlier ones only.
        outputs: of the training graph the loss; of the evaluation graph the loss, then the tensor
            leaves of the model's output. Nodes or inputs.
        crossing_values: by index of the node, for each node whose value crosses a unit's border.
    """

    nodes: tuple[GraphNode, ...]
    outputs: tuple[InputRef | NodeRef, ...]
    crossing_values: dict[int, ValueDescription]
