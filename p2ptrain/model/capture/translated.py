"""A translated graph, not yet cut, and the batch size in the sizes of its values.

`BatchSymbol` reads polynomials in the batch size off `torch.export`'s symbolic sizes.
`backward_graph` makes the backward of a user's function out of the nodes that a trace has recorded
behind its forward:

    forward ... | arriving  g0  backward ...  | own_backward
                  start                         what is made here
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from p2ptrain.errors import CaptureError
from p2ptrain.model.graph.effects import draws_random_numbers, mutated_references
from p2ptrain.model.graph.nodes import (
    Argument,
    BackwardGraph,
    GraphNode,
    InputRef,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.values import (
    CROSSING_DTYPES,
    MAXIMUM_DEGREE,
    Polynomial,
    Term,
    ValueDescription,
)

_VARIES = 2
"""Samples from which on torch.export takes a batch that varies."""


@dataclass(frozen=True, slots=True)
class LengthGuards:
    """What a trace has found true of lengths, for which alone it is the model.

    Attributes:
        conditions: such as `s27 <= 8`, of `if x.shape[1] > 8:`.
        numbers: which length a symbol stands for.
    """

    conditions: tuple[sympy.Expr, ...]
    numbers: Mapping[sympy.Symbol, int]

    def are_met(self, lengths: Sequence[int]) -> bool:
        """Whether it is for these."""
        values = {symbol: lengths[number] for symbol, number in self.numbers.items()}
        return all(bool(condition.subs(values)) for condition in self.conditions)


class BatchSymbol:
    """The symbols that stand for the batch size, and for lengths, in one exported graph.

    Attributes:
        lengths: what the lengths were when it was exported.
    """

    def __init__(
        self,
        size: int | torch.SymInt,
        varying: Sequence[Sequence[int | torch.SymInt]] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        """`varying`: by length, the sizes that are that length."""
        self.lengths = tuple(lengths)
        if not isinstance(size, torch.SymInt):
            raise CaptureError(
                f"the model works for one batch size only ({size}). Use x.shape[0] or -1 where the "
                "batch size is written as a number"
            )
        self._environment = size.node.shape_env
        self._symbol = self._environment.replace(size.node.expr)
        self._variables: dict[sympy.Symbol, int] = {self._symbol: 0}
        for number, sizes in enumerate(varying, 1):
            for one in sizes:
                if isinstance(one, torch.SymInt):
                    symbol = self._environment.replace(one.node.expr)
                    if isinstance(symbol, sympy.Symbol):
                        self._variables.setdefault(symbol, number)
        self._known: dict[sympy.Expr, Polynomial | None] = {}

    def is_fixed(self, size: int | torch.SymInt) -> bool:
        """Whether the trace has found that it can be one number only."""
        if isinstance(size, torch.SymInt):
            return not isinstance(self._environment.replace(size.node.expr), sympy.Symbol)
        return True

    def least(self, program: torch.export.ExportedProgram) -> int:
        """The fewest samples for which `program` is the model; 1 where it is for all that vary."""
        limits = program.range_constraints.get(self._symbol)
        least = 0 if limits is None else int(limits.lower)
        return least if least > _VARIES else 1

    def most(self, program: torch.export.ExportedProgram) -> int | None:
        """The most samples for which `program` is the model; None where it is for any number."""
        limits = program.range_constraints.get(self._symbol)
        is_bounded = limits is not None and limits.upper < sys.maxsize - 1
        return int(limits.upper) if limits is not None and is_bounded else None

    @property
    def guards(self) -> LengthGuards:
        """Of the lengths alone."""
        numbers = {symbol: number - 1 for symbol, number in self._variables.items() if number}
        found = (self._environment.replace(guard.expr) for guard in self._environment.guards)
        return LengthGuards(tuple(g for g in found if g.free_symbols <= numbers.keys()), numbers)

    def polynomial(self, size: int | torch.SymInt) -> Polynomial | None:
        """`size` as a polynomial in the batch size, or None where it is none."""
        if not isinstance(size, torch.SymInt):
            return Polynomial((int(size),))
        expression = size.node.expr
        if expression not in self._known:
            self._known[expression] = self._read(self._environment.replace(expression))
        return self._known[expression]

    def _read(self, expression: sympy.Expr) -> Polynomial | None:
        if expression == self._symbol:
            return Polynomial((0, 1))
        if expression.free_symbols - self._variables.keys():
            return None
        symbols = tuple(self._variables)
        if not expression.is_polynomial(*symbols):
            return None
        coefficients, terms = [0] * (MAXIMUM_DEGREE + 1), dict[tuple[int, ...], int]()
        for monomial, coefficient in sympy.Poly(expression, *symbols).terms():
            powers = [0] * (len(self.lengths) + 1)
            for symbol, power in zip(symbols, monomial, strict=True):
                powers[self._variables[symbol]] += power
            if max(powers) > MAXIMUM_DEGREE or not coefficient.is_Integer:
                return None
            if any(powers[1:]):
                key = _trimmed(powers)
                terms[key] = terms.get(key, 0) + int(coefficient)
            else:
                coefficients[powers[0]] += int(coefficient)
        return Polynomial(
            _trimmed(coefficients) or (0,),
            tuple(Term(terms[powers], powers) for powers in sorted(terms) if terms[powers]),
        )

    def describe(self, name: str, value: Any, may_require_grad: bool) -> ValueDescription | None:
        """A traced value as it would cross a cut; None where it cannot."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        if value.dtype not in CROSSING_DTYPES:
            return None
        dimensions = tuple(self.polynomial(size) for size in value.shape)
        known = tuple(d for d in dimensions if d is not None)
        if len(known) < len(dimensions):
            return None
        return ValueDescription(name, value.dtype, known, may_require_grad)


def _trimmed(numbers: Sequence[int]) -> tuple[int, ...]:
    """Without zeros at the end."""
    end = max((k for k, n in enumerate(numbers, 1) if n), default=0)
    return tuple(numbers[:end])


@dataclass(frozen=True, slots=True)
class Traced:
    """What tracing knows of a node besides the node itself.

    Attributes:
        value: what it gave: a fake tensor, a symbolic number, or a tuple of them.
        module: dotted path of the user's module it ran in; "" for the model itself and the loss.
    """

    value: Any
    module: str


@dataclass(frozen=True, slots=True)
class Translated:
    """One mode's graph, not yet cut.

    Attributes:
        nodes: as they run.
        traced: one for each node.
        inputs, targets: fake tensors of the leaves.
        outputs: the loss, then the leaves of the model's output.
        state: fake tensors of the parameters, buffers and constants.
        batch: reads the batch size's polynomials off symbolic sizes.
    """

    nodes: tuple[GraphNode, ...]
    traced: tuple[Traced, ...]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    outputs: tuple[InputRef | NodeRef, ...]
    state: Mapping[Reference, Tensor]
    batch: BatchSymbol

    def arranged(self, order: Sequence[int]) -> Translated:
        """With the nodes `order` names, in that order."""
        position = {old: new for new, old in enumerate(order)}

        def renumbered(reference: Reference) -> Reference:
            if isinstance(reference, NodeRef):
                return NodeRef(position[reference.index])
            return reference

        return replace(
            self,
            nodes=tuple(self.nodes[old].reading(renumbered) for old in order),
            traced=tuple(self.traced[old] for old in order),
            outputs=tuple(
                NodeRef(position[one.index]) if isinstance(one, NodeRef) else one
                for one in self.outputs
            ),
        )

    def value_of(self, argument: Argument) -> Any:
        """The fake tensor that stands for an argument, where it is one."""
        match argument:
            case NodeRef():
                return self.traced[argument.index].value
            case InputRef():
                return self.inputs[argument.index]
            case TargetRef():
                return self.targets[argument.index]
            case StateRef():
                return self.state[argument]
        return None


ARRIVING = "p2ptrain.arriving"
"""What stands for the gradients, while a graph is translated; no operator: it never runs."""


def backward_graph(
    name: str,
    nodes: Sequence[GraphNode],
    start: int,
    arriving: Sequence[NodeRef],
    gradients: Sequence[Reference | None],
) -> tuple[BackwardGraph, tuple[Reference, ...]]:
    """The backward that nodes from `start` on compute, and what it takes of the graph around it.

    Args:
        name: of the user's function.
        nodes: all that there are so far; that at `start` makes `arriving`.
        gradients: the results, one for each input.

    Raises:
        CaptureError: it draws random numbers.
    """
    made = _needed(nodes, start, arriving, gradients)
    places: dict[Reference, InputRef | NodeRef] = {
        reference: InputRef(index) for index, reference in enumerate(arriving)
    }
    inside = {index: number for number, index in enumerate(made)}
    outside: list[Reference] = []
    read = [reference for index in made for reference in nodes[index].references()]
    for reference in [*read, *(g for g in gradients if g is not None)]:
        if isinstance(reference, NodeRef) and reference.index in inside:
            places[reference] = NodeRef(inside[reference.index])
        elif reference not in places:
            places[reference] = InputRef(len(arriving) + len(outside))
            outside.append(reference)
    moved = (nodes[index].reading(places.__getitem__) for index in made)
    graph = BackwardGraph(
        tuple(replace(n, name=f"n{k}", grad_enabled=False) for k, n in enumerate(moved)),
        tuple(None if g is None else places[g] for g in gradients),
    )
    if any(map(draws_random_numbers, graph.nodes)):
        raise CaptureError(
            f"{name}.backward draws random numbers, which other devices would draw otherwise. Draw "
            "them in its forward, and save them for the backward"
        )
    return graph, tuple(outside)


def _needed(
    nodes: Sequence[GraphNode],
    start: int,
    arriving: Sequence[NodeRef],
    gradients: Sequence[Reference | None],
) -> list[int]:
    """Those behind `start` that the gradients follow from, or that write to something."""
    given = {start, *(reference.index for reference in arriving)}
    needed = {g.index for g in gradients if isinstance(g, NodeRef)}
    for index in range(len(nodes) - 1, start, -1):
        if index in given or not (index in needed or mutated_references(nodes[index])):
            continue
        needed.add(index)
        needed.update(r.index for r in nodes[index].references() if isinstance(r, NodeRef))
    return sorted(index for index in needed - given if index > start)
