"""A model as data: nodes that each apply one named operator to earlier values.

It is what `torch.export` produces, without the Python: operator names, not functions. See
`operators` for the names that may occur, and `stage/program.py` for how a graph is run.

Arguments of nodes travel as themselves where CBOR has them (None, bool, int, float, text, lists);
others are a map with one key (`_Tagged`):

    {"i": 0} input   {"t": 0} target    {"s": name} state   {"n": 3} node   {"p": [0, 1]} polynomial
    (with lengths, a list of [coefficient, [powers of the batch size and the lengths]] at its end)
    {"d": "float32"} dtype   {"m": "channels_last"} memory format   {"l": "strided"} layout
    {"c": "cpu"} device   {"z": [0.0, 1.0]} complex number
    {"b": [[node, ...], [{"n": 3}, null]]} a backward, with {"i": 0} for what it is given
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import torch

from p2ptrain.model.graph.values import (
    Described,
    DType,
    Name,
    Polynomial,
    Size,
    ValueDescription,
    one_of,
)
from p2ptrain.net.forms import By, Key, Length, Range, Row, Text, write_form
from p2ptrain.net.read_form import read_form

NODES_LIMIT = 50_000

LEAVES_LIMIT = 4_096

_NESTED = 4
"""Lists in lists."""

Index: TypeAlias = Annotated[int, Range(0, NODES_LIMIT)]


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

    nodes: Nodes
    gradients: Annotated[tuple[Crossing | None, ...], Length(LEAVES_LIMIT)]


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

    name: Annotated[str, Text(256, 1, like="[A-Za-z_][A-Za-z0-9_]*")]
    operator: Annotated[str, Text(256)]
    args: Annotated[tuple[Given, ...], Length(64)]
    kwargs: Annotated[tuple[tuple[Name, Given], ...], Length(64)]
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

    nodes: Nodes
    outputs: Annotated[tuple[Crossing, ...], Length(LEAVES_LIMIT)]
    crossing_values: Annotated[
        dict[int, ValueDescription],
        Key("values"),
        By(
            *(dict, lambda values: [*values.items()]),
            Annotated[tuple[tuple[Index, Described], ...], Length(NODES_LIMIT)],
        ),
    ]


_Real: TypeAlias = Annotated[float, Range(-math.inf, math.inf, finite=False)]

_Complex: TypeAlias = Annotated[
    complex, By(lambda parts: complex(*parts), lambda z: (z.real, z.imag), tuple[_Real, _Real])
]

_MemoryFormat: TypeAlias = Annotated[
    torch.memory_format,
    one_of(
        *(torch.contiguous_format, torch.preserve_format),
        *(torch.channels_last, torch.channels_last_3d),
    ),
]


def _index(reference: InputRef | TargetRef | NodeRef) -> int:
    return reference.index


@dataclass(frozen=True, slots=True)
class _Tagged:
    """An argument that CBOR does not have: one of these."""

    i: Annotated[InputRef, By(InputRef, _index, Index)] | None = None
    t: Annotated[TargetRef, By(TargetRef, _index, Index)] | None = None
    s: Annotated[StateRef, By(StateRef, lambda state: state.name, Name)] | None = None
    n: Annotated[NodeRef, By(NodeRef, _index, Index)] | None = None
    p: Size | None = None
    d: DType | None = None
    m: _MemoryFormat | None = None
    l: Annotated[torch.layout, one_of(torch.strided)] | None = None  # noqa: E741
    c: Annotated[torch.device, one_of(torch.device("cpu"))] | None = None
    z: _Complex | None = None
    b: Annotated[BackwardGraph, Row()] | None = None


_KINDS = (
    *(InputRef, TargetRef, StateRef, NodeRef, Polynomial, torch.dtype),
    *(torch.memory_format, torch.layout, torch.device, complex, BackwardGraph),
)
"""Of the fields of `_Tagged`, in their order."""


def _write_argument(argument: Argument) -> Any:
    if isinstance(argument, tuple):
        return [_write_argument(item) for item in argument]
    fields: list[Any] = [argument if isinstance(argument, kind) else None for kind in _KINDS]
    return write_form(_Tagged(*fields)) if any(f is not None for f in fields) else argument


def _read_argument(value: Any, depth: int = _NESTED) -> Argument:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(2**63) < value < 2**63:
        return value
    if isinstance(value, str) and len(value) <= 512:
        return value
    if isinstance(value, list) and depth and len(value) <= LEAVES_LIMIT:
        return tuple(_read_argument(item, depth - 1) for item in value)
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("an argument is malformed")
    tagged = read_form(_Tagged, value, "an argument")
    (tag,) = value
    if (read := getattr(tagged, tag)) is None:
        raise ValueError("an argument is malformed")
    return read  # type: ignore[no-any-return]


def _read_crossing(value: Any) -> InputRef | NodeRef:
    reference = _read_argument(value)
    if not isinstance(reference, InputRef | NodeRef):
        raise ValueError("a result is neither a node nor an input")
    return reference


Given: TypeAlias = Annotated[Argument, By(_read_argument, _write_argument)]

Crossing: TypeAlias = Annotated[InputRef | NodeRef, By(_read_crossing, _write_argument)]

Nodes: TypeAlias = Annotated[tuple[Annotated[GraphNode, Row()], ...], Length(NODES_LIMIT)]
