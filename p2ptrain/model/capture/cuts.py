"""Where a graph can be cut, what crosses each possible cut, and the same units for evaluation.

A cut at position p lies before node p. It is possible where everything that crosses it can travel
(a tensor whose shape is a polynomial in the batch size), where the batch size follows from what
crosses, and where it separates no write from what it writes to (`aliases`).

A stage holds the parameters of its units once, for both graphs. So every evaluation node that reads
a trained or written tensor must stand in a unit that has it in training (`match_cuts`); between
such nodes the borders fall where the same operators of the same modules are divided in training. A
border that the evaluation graph cannot have is given up in both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Matched:
    """Borders of the units: positions in the training graph and in the evaluation graph."""

    train: tuple[int, ...]
    evaluate: tuple[int, ...]


def match_cuts(
    train: Translated,
    evaluate: Translated,
    cuts: Sequence[int],
    widths: Mapping[int, float],
    owned: frozenset[str],
) -> Matched:
    """Carry the training graph's `cuts` over.

    Args:
        train, evaluate: the two graphs.
        cuts: positions in `train`, ascending.
        widths: possible positions in `evaluate` -> bytes a sample.
        owned: names of tensors that are trained, or written to in training.
    """
    remaining = list(cuts)
    while True:
        places = _Places(train, evaluate, remaining, owned)
        positions, failed = places.choose(widths)
        if failed is None:
            return Matched(tuple(remaining), tuple(positions))
        del remaining[failed]


class _Places:
    def __init__(
        self,
        train: Translated,
        evaluate: Translated,
        cuts: Sequence[int],
        owned: frozenset[str],
    ) -> None:
        self._cuts = cuts
        units = list(_units_of_nodes(len(train.nodes), cuts))
        owners: dict[str, set[int]] = {}
        for node, unit in zip(train.nodes, units, strict=True):
            for reference in node.references():
                if isinstance(reference, StateRef) and reference.name in owned:
                    owners.setdefault(reference.name, set()).add(unit)
        self._allowed = [_allowed(node.references(), owners) for node in evaluate.nodes]
        where = dict(zip(_keys(train), units, strict=True))
        self._hints = [where.get(key) for key in _keys(evaluate)]

    def choose(self, widths: Mapping[int, float]) -> tuple[list[int], int | None]:
        """Positions for all cuts, or the number of the first cut that has none."""
        positions: list[int] = []
        for number in range(len(self._cuts)):
            position = self._best(number + 1, positions[-1] if positions else 1, widths)
            if position is None:
                return positions, number
            positions.append(position)
        return positions, self._violated(positions)

    def _best(self, unit: int, lowest: int, widths: Mapping[int, float]) -> int | None:
        """Where unit `unit` begins: at or after `lowest`."""
        before = [k for k, allowed in enumerate(self._allowed) if allowed and max(allowed) < unit]
        after = [k for k, allowed in enumerate(self._allowed) if allowed and min(allowed) >= unit]
        first = max(lowest, before[-1] + 1 if before else 1)
        last = min(len(self._allowed) - 1, after[0] if after else len(self._allowed) - 1)
        agreement = self._agreement(unit)
        return min(
            (p for p in range(first, last + 1) if p in widths),
            key=lambda p: (-agreement[p], widths[p], -p),
            default=None,
        )

    def _agreement(self, unit: int) -> list[int]:
        """For each position: how many operators it puts on the side where training has them."""
        score = sum(1 for hint in self._hints if hint is not None and hint >= unit)
        scores = [score]
        for hint in self._hints:
            if hint is not None:
                score += 1 if hint < unit else -1
            scores.append(score)
        return scores

    def _violated(self, positions: Sequence[int]) -> int | None:
        """A cut that parts a node from the only units that hold its tensor (tied weights)."""
        units = _units_of_nodes(len(self._allowed), positions)
        for unit, allowed in zip(units, self._allowed, strict=True):
            if allowed is not None and unit not in allowed:
                nearest = min(allowed, key=lambda other: abs(other - unit))
                return min(unit, nearest)
        return None


def _allowed(references: Iterator[object], owners: Mapping[str, set[int]]) -> set[int] | None:
    """Units that hold every owned tensor read; None where any unit will do."""
    allowed: set[int] | None = None
    for reference in references:
        if isinstance(reference, StateRef) and reference.name in owners:
            units = owners[reference.name]
            allowed = set(units) if allowed is None else allowed & units
    return allowed or None


def _units_of_nodes(count: int, cuts: Sequence[int]) -> Iterator[int]:
    unit = 0
    for index in range(count):
        while unit < len(cuts) and cuts[unit] <= index:
            unit += 1
        yield unit


def _keys(graph: Translated) -> Iterator[tuple[str, str, int]]:
    """An operator's place in the model: its module, its name, how often they occurred before."""
    seen: Counter[tuple[str, str]] = Counter()
    for node, traced in zip(graph.nodes, graph.traced, strict=True):
        kind = (traced.module, node.operator.split(".")[1].rstrip("_"))
        yield (*kind, seen[kind])
        seen[kind] += 1
