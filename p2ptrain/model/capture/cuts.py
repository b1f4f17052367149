"""Where a graph can be cut, and what crosses each possible cut.

A cut at position p lies before node p. It is possible where everything that crosses it can travel
(a tensor whose shape is a polynomial in the batch size), where the batch size follows from what
crosses, and where it separates no write from what it writes to (`aliases`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2ptrain.model.capture.aliases import Aliases
from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.graph.description import Crossing, last_uses
from p2ptrain.model.graph.effects import aliased_references, mutated_references
from p2ptrain.model.graph.nodes import (
    Argument,
    BackwardGraph,
    InputRef,
    NodeRef,
    Reference,
    StateRef,
    TargetRef,
)
from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.graph.values import Polynomial, ValueDescription, shows_sizes

REFERENCE_BATCH = 16
"""Batch size at which the widths of cuts are compared."""


@dataclass(frozen=True, slots=True)
class GraphCuts:
    """Every possible cut of one graph.

    Attributes:
        widths: position -> bytes a sample that cross there.
        values: by index of the node, every value of the graph that could cross.
    """

    widths: Mapping[int, float]
    values: Mapping[int, ValueDescription]


def possible_cuts(
    graph: Translated,
    aliases: Aliases,
    inputs: tuple[ValueDescription, ...],
    targets: tuple[ValueDescription, ...],
    trainable: frozenset[str],
) -> GraphCuts:
    """All positions where `graph` may be cut; `trainable` names its parameters with gradients."""
    values = _describe_values(graph, aliases, trainable)
    forbidden = {p for first, last in aliases.uncut_ranges() for p in range(first + 1, last + 1)}
    live = last_uses(graph.nodes, graph.outputs)
    widths: dict[int, float] = {}
    crossing: set[Crossing] = {v for v in live if isinstance(v, InputRef)}
    wanted = _wanted_sizes(graph, shows_sizes(targets, len(graph.batch.lengths)))
    ends: dict[int, list[Crossing]] = defaultdict(list)
    for value, last in live.items():
        ends[last].append(value)
    for position in range(1, len(graph.nodes)):
        crossing.difference_update(ends[position - 1])
        made = NodeRef(position - 1)
        if live.get(made, -1) >= position:
            crossing.add(made)
        if position in forbidden:
            continue
        width = _width(crossing, inputs, values, graph.batch.lengths, wanted[position])
        if width is not None:
            widths[position] = width
    return GraphCuts(widths, values)


def _width(
    crossing: Iterable[Crossing],
    inputs: tuple[ValueDescription, ...],
    values: Mapping[int, ValueDescription],
    lengths: tuple[int, ...],
    wanted: frozenset[int],
) -> float | None:
    """Bytes a sample, or None where this cannot cross."""
    width, depends_on_batch, described = 0.0, False, []
    for value in crossing:
        table = inputs if isinstance(value, InputRef) else values
        if isinstance(value, NodeRef) and value.index not in values:
            return None
        description = table[value.index]
        width += description.nbytes(REFERENCE_BATCH, *lengths) / REFERENCE_BATCH
        depends_on_batch = depends_on_batch or description.depends_on_batch
        described.append(description)
    if lengths:
        depends_on_batch = shows_sizes(described, len(lengths)).issuperset(wanted)
    return width if depends_on_batch else None


def _wanted_sizes(graph: Translated, by_targets: frozenset[int]) -> list[frozenset[int]]:
    """By position, what must show at a cut there: the batch size, and lengths used behind it.

    Not where a node that reads targets comes before: a stage that has it is given `by_targets`.
    """
    wanted = [frozenset({0})]
    for node in reversed(graph.nodes):
        here = wanted[-1].union(*map(_lengths_in, (*node.args, *(v for _, v in node.kwargs))))
        reads = any(isinstance(reference, TargetRef) for reference in node.references())
        wanted.append((here - by_targets if reads else here) | {0})
    return wanted[::-1]


def _lengths_in(argument: Argument) -> frozenset[int]:
    """Numbers, from 1, of the lengths that are written there."""
    match argument:
        case tuple():
            return frozenset().union(*map(_lengths_in, argument))
        case BackwardGraph():
            return frozenset().union(*(_lengths_in(one) for n in argument.nodes for one in n.args))
        case Polynomial():
            powers = (term.powers for term in argument.terms)
            return frozenset(k for one in powers for k, p in enumerate(one) if k and p)
    return frozenset()


def _describe_values(
    graph: Translated, aliases: Aliases, trainable: frozenset[str]
) -> dict[int, ValueDescription]:
    differentiable = _may_require_grad(graph, aliases, trainable)
    values: dict[int, ValueDescription] = {}
    for index, (node, traced) in enumerate(zip(graph.nodes, graph.traced, strict=True)):
        described = graph.batch.describe(node.name, traced.value, index in differentiable)
        if described is not None:
            values[index] = described
    return values


def _may_require_grad(
    graph: Translated, aliases: Aliases, trainable: frozenset[str]
) -> frozenset[int]:
    """Nodes whose result may carry a gradient. In doubt yes: it costs little, the rest is wrong.

    In `torch.no_grad()` what an operator gives back as it was keeps its gradient: `x.flatten(1)` of
    two dimensions, `x.float()` of what is float32 already. A view has none, and may not be
    distinguishable from it; autograd drops what comes back for it.
    """
    found: set[Reference] = {StateRef(name) for name in trainable}
    for index, (node, traced) in enumerate(zip(graph.nodes, graph.traced, strict=True)):
        if not resolve(node.operator).differentiable:
            continue
        read = node.references() if node.grad_enabled else aliased_references(node)
        if not _is_differentiable_type(traced.value) or found.isdisjoint(read):
            continue
        found.add(NodeRef(index))
        for written in mutated_references(node) if node.grad_enabled else ():
            # A gradient that is written into a tensor shows in all of its views.
            found.update(aliases.members[aliases.find(written)])
    return frozenset(
        value.index
        for value in found  # indices that topk gives are beside its values
        if isinstance(value, NodeRef) and _is_differentiable_type(graph.traced[value.index].value)
    )


def _is_differentiable_type(value: object) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is None or bool(dtype.is_floating_point or dtype.is_complex)
