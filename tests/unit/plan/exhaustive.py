"""Every straight pipeline there is, simulated: the oracle for the search on tiny questions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, permutations

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft, draft_pipeline
from p2ptrain.plan.simulate import round_seconds
from p2ptrain.plan.split import BatchSplit


def placements(
    cost: CostModel, *, private: bool
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(borders, devices) over all subsets, orders and cuts."""
    holder = (cost.holder,)
    inner = [d for d in range(len(cost.devices)) if not (private and d == cost.holder)]
    for count in range(0 if private else 1, len(inner) + 1):
        for middle in permutations(inner, count):
            ends = holder if private else ()
            devices = (*ends, *middle, *ends) if middle else holder
            for cuts in combinations(range(1, cost.unit_count), len(devices) - 1):
                yield (0, *cuts, cost.unit_count), devices


def best_round_seconds(
    cost: CostModel, split: BatchSplit, *, private: bool = False
) -> tuple[float, Draft | None]:
    """The fastest round with usual depths (lowered for memory); inf where nothing fits."""
    best: tuple[float, Draft | None] = math.inf, None
    for borders, devices in placements(cost, private=private):
        draft = draft_pipeline(cost, split, borders, devices)
        if draft is not None:
            seconds = round_seconds(cost, draft)
            if seconds < best[0]:
                best = seconds, draft
    return best
