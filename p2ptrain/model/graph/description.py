"""A captured model, complete and without code: what a device gets instead of the user's script.

A stage is a range of units [first, end). Everything a stage needs to know follows from here: which
tensors it holds, what crosses its two cuts, whether it needs the loss's target. Mode is "train" or
"eval" throughout; boundary b lies before unit b, from 0 (the model's inputs) to the number of units
(the loss, and in evaluation the leaves of the model's output).

A description travels as strict CBOR (`decoding` reads it); how arguments of nodes do, `nodes` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

import torch

from p2ptrain.model.graph.nodes import (
    LEAVES_LIMIT,
    Graph,
    GraphNode,
    Index,
    InputRef,
    NodeRef,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.values import (
    DIMENSIONS_LIMIT,
    ELEMENTS_LIMIT,
    MOST_LENGTHS,
    Described,
    DType,
    Name,
    ValueDescription,
)
from p2ptrain.net import cbor
from p2ptrain.net.forms import By, Key, Length, Range, Rare, Row, write_form

Mode: TypeAlias = Literal["train", "eval"] | str


_TENSORS = 20_000

_Sizes: TypeAlias = Annotated[
    tuple[Annotated[int, Range(0, ELEMENTS_LIMIT)], ...], Length(DIMENSIONS_LIMIT)
]


class TensorKind(StrEnum):
    """What a tensor of the model's state is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of the model's state.

    Attributes:
        name: canonical: of several names of a tied tensor the first one.
        kind: constants are tensors that the model computes with but does not list in its state.
        dtype, shape, strides: strides are the user's, because some operators choose by them.
        trainable: a parameter that takes gradients.
    """

    name: Name
    kind: TensorKind
    dtype: DType
    shape: _Sizes
    strides: _Sizes
    trainable: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """A run of nodes that is placed as a whole.

    Attributes:
        name: of the user's module it comes from, such as "features.3".
        flops: operations of a forward pass for one sample, roughly.
        train, evaluate: [first, end) of its nodes in the two graphs.
    """

    name: Name
    flops: Annotated[int, Range(0, 2**62)]
    train: tuple[Index, Index]
    evaluate: tuple[Index, Index]

    def nodes(self, mode: Mode) -> tuple[int, int]:
        """[first, end) of its nodes in the graph of `mode`."""
        return self.train if mode == "train" else self.evaluate


@dataclass(frozen=True)
class ModelDescription:
    """A model, its loss and its units.

    Attributes:
        name: of the user's class, to be shown.
        inputs, targets: leaves of the batch, in order.
        tensors: the state: parameters in the order of the user's `parameters()`, then the rest.
        tied: another name in the user's state_dict -> canonical name.
        state_dict: every tensor's name in the user's state_dict, in its order.
        train, evaluate: the graphs; outputs are the loss, and the loss and the output's leaves.
        units: they divide both graphs.
        longest: of each length that differs from batch to batch, the largest seen when the model
            was captured: it is measured and planned with these.
    """

    name: Name
    inputs: Annotated[tuple[Described, ...], Length(LEAVES_LIMIT, 1)]
    targets: Annotated[tuple[Described, ...], Length(LEAVES_LIMIT)]
    tensors: Annotated[tuple[Annotated[TensorDescription, Row()], ...], Length(_TENSORS)]
    tied: Annotated[
        Mapping[str, str],
        By(
            *(dict, lambda tied: [*tied.items()]),
            Annotated[tuple[tuple[Name, Name], ...], Length(_TENSORS)],
        ),
    ]
    state_dict: Annotated[tuple[Name, ...], Length(_TENSORS)]
    train: Graph
    evaluate: Annotated[Graph, Key("eval")]
    units: Annotated[tuple[Annotated[UnitDescription, Row()], ...], Length(1_024, 1)]
    longest: Annotated[
        tuple[Annotated[int, Range(1, ELEMENTS_LIMIT)], ...], Length(MOST_LENGTHS), Rare()
    ] = ()

    def to_bytes(self) -> bytes:
        """Strict CBOR; equal models give equal bytes."""
        return cbor.dumps({"format": FORMAT, **write_form(self)})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_bytes`, 64 hex digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def graph(self, mode: Mode) -> Graph:
        """The graph of `mode`."""
        return self.train if mode == "train" else self.evaluate

    def node_range(self, first: int, end: int, mode: Mode) -> tuple[int, int]:
        """[first, end) of the nodes of units [first, end)."""
        units = self.units[first:end]
        return units[0].nodes(mode)[0], units[-1].nodes(mode)[1]

    @cached_property
    def tensors_by_name(self) -> Mapping[str, TensorDescription]:
        """By canonical name."""
        return {tensor.name: tensor for tensor in self.tensors}

    # -- what a stage holds ----------------------------------------------------------------------

    def state_names(self, first: int, end: int) -> tuple[str, ...]:
        """Canonical names of the parameters, buffers and constants that units [first, end) use."""
        used = set().union(*self._unit_state[first:end])
        return tuple(tensor.name for tensor in self.tensors if tensor.name in used)

    def trainable_names(self, first: int, end: int) -> tuple[str, ...]:
        """Those of `state_names` that take gradients."""
        by_name = self.tensors_by_name
        return tuple(name for name in self.state_names(first, end) if by_name[name].trainable)

    def shared_between(self, boundaries: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Trainable tensors used by several stages -> the stages, ascending.

        Args:
            boundaries: of the stages, from 0 to the number of units.
        """
        users: dict[str, list[int]] = {}
        for stage, (first, end) in enumerate(pairwise(boundaries)):
            for name in self.trainable_names(first, end):
                users.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}

    def state_dict_names(self, first: int, end: int) -> tuple[str, ...]:
        """Names of the user's state_dict that belong to units [first, end).

        Every name belongs to at least one unit: a tensor that nothing uses goes with its neighbour
        in the state_dict. A tied tensor's names belong to each unit that uses it.
        """
        here = range(first, end)
        return tuple(
            name
            for name, units in zip(self.state_dict, self._state_dict_units, strict=True)
            if any(unit in here for unit in units)
        )

    @cached_property
    def _unit_state(self) -> tuple[frozenset[str], ...]:
        """Canonical names that each unit uses in either mode."""
        return tuple(
            frozenset(
                reference.name
                for mode in ("train", "eval")
                for node in self.graph(mode).nodes[slice(*unit.nodes(mode))]
                for reference in node.references()
                if isinstance(reference, StateRef)
            )
            for unit in self.units
        )

    @cached_property
    def _state_dict_units(self) -> tuple[tuple[int, ...], ...]:
        users: dict[str, list[int]] = {}
        for unit, names in enumerate(self._unit_state):
            for name in names:
                users.setdefault(name, []).append(unit)
        units = [tuple(users.get(self.tied.get(n, n), ())) for n in self.state_dict]
        return tuple(_with_neighbours(units, default=len(self.units) - 1))

    # -- what crosses its cuts -------------------------------------------------------------------

    def crossing(self, boundary: int, mode: Mode) -> tuple[ValueDescription, ...]:
        """What crosses a boundary, in the order in which stages take and give it.

        A value that a later stage uses crosses every boundary before that stage. Boundary 0's are
        the model's inputs that `mode` uses; where it uses none, the first of them, which shows
        how many samples there are. The last boundary's are the graph's outputs: the loss, then the
        output's leaves.
        """
        return tuple(self.describe(value, mode) for value in self.crossing_values(boundary, mode))

    def crossing_values(self, boundary: int, mode: Mode) -> tuple[Crossing, ...]:
        """The values themselves, described by `crossing`."""
        crossings = self._train_crossings if mode == "train" else self._evaluate_crossings
        return crossings[boundary]

    def carries_gradients(self, boundary: int) -> bool:
        """Whether gradients cross it in training; none do in front of the first trained weight."""
        return any(value.may_require_grad for value in self.crossing(boundary, "train"))

    def is_forward_only(self, unit: int) -> bool:
        """Whether nothing comes back to a unit: it keeps nothing, and has no backward."""
        return unit + 1 < len(self.units) and not self.carries_gradients(unit + 1)

    def describe(self, value: Crossing, mode: Mode) -> ValueDescription:
        """What is known of a value that crosses a boundary."""
        if isinstance(value, InputRef):
            return self.inputs[value.index]
        return self.graph(mode).crossing_values[value.index]

    def target_uses(self, first: int, end: int, mode: Mode) -> tuple[int, ...]:
        """Indices of the target's leaves that units [first, end) use; the holder sends these."""
        start, stop = self.node_range(first, end, mode)
        used = {
            reference.index
            for node in self.graph(mode).nodes[start:stop]
            for reference in node.references()
            if isinstance(reference, TargetRef)
        }
        return tuple(sorted(used))

    @cached_property
    def _train_crossings(self) -> tuple[tuple[Crossing, ...], ...]:
        return self._crossings("train")

    @cached_property
    def _evaluate_crossings(self) -> tuple[tuple[Crossing, ...], ...]:
        return self._crossings("eval")

    def _crossings(self, mode: Mode) -> tuple[tuple[Crossing, ...], ...]:
        graph = self.graph(mode)
        last = last_uses(graph.nodes, graph.outputs)
        starts = [unit.nodes(mode)[0] for unit in self.units]
        entering, *inner = [tuple(crossing_at(graph, position, last)) for position in starts]
        return (entering or (InputRef(0),), *inner, graph.outputs)


def _with_neighbours(units: Sequence[tuple[int, ...]], default: int) -> Iterable[tuple[int, ...]]:
    """Each empty entry filled from the nearest one before it, else after it, else `default`."""
    filled: list[tuple[int, ...]] = []
    first_known = next((entry for entry in units if entry), (default,))
    known = first_known[:1]
    for entry in units:
        if entry:
            known = entry[-1:]
        filled.append(entry or known)
    return filled


FORMAT = "p2ptrain.model/1"

Crossing = InputRef | NodeRef


def last_uses(nodes: Iterable[GraphNode], outputs: Iterable[Crossing]) -> dict[Crossing, int]:
    """Input or node -> index of the last node that reads it; the number of nodes for a result."""
    last: dict[Crossing, int] = {}
    count = 0
    for index, node in enumerate(nodes):
        count += 1
        for reference in node.references():
            if isinstance(reference, InputRef | NodeRef):
                last[reference] = index
    last.update(dict.fromkeys(outputs, count))
    return last


def crossing_at(graph: Graph, position: int, last: Mapping[Crossing, int]) -> list[Crossing]:
    """What crosses a cut of a finished graph: inputs first, each in ascending order."""
    inputs = [v for v in last if isinstance(v, InputRef) and last[v] >= position]
    nodes = [v for v in last if isinstance(v, NodeRef) and v.index < position <= last[v]]
    return [*sorted(inputs, key=lambda v: v.index), *sorted(nodes, key=lambda v: v.index)]
