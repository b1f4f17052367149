"""The same units in the evaluation graph as in the training graph.

A stage holds the parameters of its units once, for both graphs. So every evaluation node that reads
a trained or written tensor must stand in a unit that has it in training; between such nodes the
borders fall where the same operators of the same modules are divided in training. A border that
the evaluation graph cannot have is given up in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.model.capture.translated import Translated
from p2ptrain.model.graph.nodes import StateRef


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
