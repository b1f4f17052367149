"""Fewer places to cut: a model of hundreds of units is searched as some dozens of blocks.

Asteroid (section 5.7) advises blocks for large models without saying which. Here neighbours are
merged one cut at a time, always the cut that helps least: much crosses it, and a piece that it
separates is small in time, weights and activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from p2ptrain.plan.cost.cost_model import CostModel


def useful_cuts(cost: CostModel, most: int) -> tuple[int, ...]:
    """At most `most` borders inside the model, ascending, as unit numbers."""
    count = cost.unit_count
    if count - 1 <= most:
        return tuple(range(1, count))
    return _Merging(_sizes(cost), [0, *map(cost.cut_bytes, range(1, count))]).cuts(most)


def _sizes(cost: CostModel) -> list[float]:
    """Every unit's largest share of the model, of time, weights or activations."""
    units = cost.profile.units
    largest = cost.profile.times.times[-1]
    shares = [
        _shares([a + b for a, b in zip(largest.forward, largest.backward, strict=True)]),
        _shares([state.trained for state in cost.unit_states]),
        _shares([unit.activation_bytes for unit in units]),
    ]
    return [max(of_unit) for of_unit in zip(*shares, strict=True)]


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values) or 1.0
    return [value / total for value in values]


class _Merging:
    """Neighbouring pieces, by the number of the unit each begins with."""

    def __init__(self, sizes: Sequence[float], crossing: Sequence[int]) -> None:
        self._size = dict(enumerate(sizes))
        self._before = {unit: unit - 1 for unit in range(1, len(sizes))}
        self._after = {unit: unit + 1 for unit in range(len(sizes))}
        self._crossing = crossing

    def cuts(self, most: int) -> tuple[int, ...]:
        """Merge until at most `most` cuts are left."""
        heap = [(self._merit(cut), cut) for cut in self._before]
        heapify(heap)
        while len(self._before) > most:
            merit, cut = heappop(heap)
            if cut not in self._before or merit != self._merit(cut):
                continue  # merged since, or worth more: then it stands in the heap again
            for changed in self._merge(cut):
                heappush(heap, (self._merit(changed), changed))
        return tuple(sorted(self._before))

    def _merit(self, cut: int) -> float:
        smaller = min(self._size[self._before[cut]], self._size[cut])
        return float(smaller / (self._crossing[cut] + 1) ** 0.5)

    def _merge(self, cut: int) -> list[int]:
        """Join the pieces on both sides; the cuts whose merit that changes."""
        before, after = self._before.pop(cut), self._after[cut]
        self._size[before] += self._size.pop(cut)
        self._after[before] = after
        if after in self._before:
            self._before[after] = before
        return [border for border in (before, after) if border in self._before]
