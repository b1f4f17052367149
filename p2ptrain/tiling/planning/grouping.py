"""The best grouping: a dynamic programme over the borders between units.

A grouping costs the sum of its groups' seconds and takes the sum of their memory on every device:
the best way to group the first e units extends a best way to group the first s,

    best(e) = min over s < e of  best(s) + cost(s, e),       best(0) = 0

which asks for each of the n (n + 1) / 2 groups once. Where memory does not hold the result, ways to
group the first units are kept side by side, as long as none is both slower and larger than another;
smaller groups never take more memory, so a group a unit decides whether there is any way at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from p2ptrain.errors import PlanError, size_text
from p2ptrain.tiling.planning.tiling_cost import Costs

MAX_WAYS = 500
"""Kept for each border where memory is short: of more the slowest go, not the one with most groups.
Reached with many units on many devices only; the result is then good, not certainly the best."""


@dataclass(frozen=True, slots=True)
class _GroupingWay:
    """To group the first units.

    Attributes:
        memory: bytes by device, filters included.
    """

    seconds: float
    memory: tuple[float, ...]
    borders: tuple[int, ...]


class TilesTooLarge(PlanError):
    """Tiles do not fit the memory of their devices.

    Attributes:
        needed: bytes by device, filters included.
    """

    def __init__(self, message: str, needed: Sequence[float]) -> None:
        super().__init__(message)
        self.needed = tuple(needed)


_Best: TypeAlias = tuple[float, int, tuple[int, ...]]
"""To group the first units: (seconds, borders, the borders)."""


def early_borders(costs: Costs) -> frozenset[int]:
    """Where halos should travel with the statistics of the unit in front, each border by itself.

    That saves an exchange; where a pooling stands between, halos are larger there.

    Args:
        costs: without any early border.
    """
    found = set[int]()
    for border in range(1, len(costs.problem.network.units)):
        if not costs.problem.network.may_be_early(border):
            continue
        early = costs.with_early((border,))
        if _around(early, border) < _around(costs, border):
            found.add(border)
    return frozenset(found)


def _around(costs: Costs, border: int) -> float:
    groups = costs.group(border - 1, border), costs.group(border, border + 1)
    return sum(inf if group is None else group.seconds for group in groups)


def best_grouping(costs: Costs) -> tuple[int, ...]:
    """The borders of the fastest grouping whose tiles fit their devices' memory.

    Among equals the one with fewer groups.

    Raises:
        TilesTooLarge: no grouping that the grid carries fits the memory; names the devices, or the
            unit that the grid does not carry as a smaller group.
    """
    fastest = _fastest(costs)
    if _fits(costs, costs.memory(fastest)):
        return fastest
    if not _fits(costs, costs.memory(range(len(costs.problem.network.units) + 1))):
        raise _too_large(costs)  # a group a unit takes least: no need to look
    return _fastest_that_fits(costs)


def _fastest(costs: Costs) -> tuple[int, ...]:
    """There is one: a group of all units lacks nothing of its neighbours."""
    count = len(costs.problem.network.units)
    best: list[_Best | None] = [(0.0, 1, (0,))]
    for end in range(1, count + 1):
        best.append(_fastest_to(costs, best, end))
    found = best[count]
    assert found is not None
    return found[2]


def _fastest_to(costs: Costs, best: Sequence[_Best | None], end: int) -> _Best | None:
    """The best way to group the first `end` units.

    A group that begins earlier computes all that a later one does, and its other units: where
    that alone, divided among all, takes too long, its exchanges need not be worked out.
    """
    least: _Best | None = None
    speeds = sum(1.0 / device.slowdown for device in costs.devices)
    work = 0.0  # of the longest group so far, at least
    for first in reversed(range(end)):
        alone, before = costs.group(first, first + 1), best[first]
        work += 0.0 if alone is None else alone.work
        if before is None or (least is not None and before[0] + work / speeds > least[0]):
            continue
        group = costs.group(first, end)
        if group is not None:
            work = max(work, group.work)
            way = before[0] + group.seconds, before[1] + 1, (*before[2], end)
            least = way if least is None else min(least, way)
    return least


def _fastest_that_fits(costs: Costs) -> tuple[int, ...]:
    count = len(costs.problem.network.units)
    filters = costs.problem.filters.trained
    ways = [[_GroupingWay(0.0, (filters,) * len(costs.devices), (0,))]]
    for end in range(1, count + 1):
        found = []
        for first in range(end):
            group = costs.group(first, end)
            if group is None:
                continue
            for way in ways[first]:
                memory = tuple(a + b for a, b in zip(way.memory, group.memory, strict=True))
                if _fits(costs, memory):
                    seconds = way.seconds + group.seconds
                    found.append(_GroupingWay(seconds, memory, (*way.borders, end)))
        ways.append(_undominated(found))
    if not ways[count]:
        raise _too_large(costs)
    return min(ways[count], key=lambda way: (way.seconds, len(way.borders))).borders


def _undominated(ways: Sequence[_GroupingWay]) -> list[_GroupingWay]:
    kept: list[_GroupingWay] = []
    for way in sorted(ways, key=lambda way: (way.seconds, way.memory)):
        if not any(all(a <= b for a, b in zip(k.memory, way.memory, strict=True)) for k in kept):
            kept.append(way)
    if len(kept) <= MAX_WAYS:
        return kept
    smallest = max(kept, key=lambda way: len(way.borders))
    return [*kept[: MAX_WAYS - 1], smallest]


def _fits(costs: Costs, memory: Sequence[float]) -> bool:
    return all(
        used <= device.memory_bytes for used, device in zip(memory, costs.devices, strict=True)
    )


def _too_large(costs: Costs) -> TilesTooLarge:
    each = range(len(costs.problem.network.units) + 1)
    needed, refusal = costs.memory(each), costs.refusal(each)
    if refusal is not None:  # its group is not in `needed`, nor what a larger one would take
        why = f"tiles do not fit the memory, and smaller groups do not fit the grid: {refusal}"
        return TilesTooLarge(why, needed)
    lacking = [
        f"{device.name} needs {size_text(used)} and has {size_text(device.memory_bytes)}"
        for used, device in zip(needed, costs.devices, strict=True)
        if used > device.memory_bytes
    ]
    why = (
        "tiles do not fit the memory, even with borders exchanged after every layer: "
        f"{', '.join(lacking)}"
    )
    return TilesTooLarge(why, needed)
