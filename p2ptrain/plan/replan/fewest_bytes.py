"""The cuts that move fewest bytes among those about as fast as the fastest.

For stages on given devices: an exact dynamic programme over the bytes that each device lacks of
units [i, j), subject to a limit on every stage's and every cut's seconds. The simulation decides
afterwards whether the result is fast enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, UnplacedGroup
from p2ptrain.plan.problem.order_cuts import Floats, Order, OrderCuts
from p2ptrain.plan.replan.replica_holders import Replicas


class Missing:
    """Bytes that each device would have to fetch, by units."""

    def __init__(self, cost: CostModel, held: Replicas) -> None:
        sizes = [state.version_bytes for state in cost.unit_states]
        self._sums: list[Floats] = []
        for device in cost.devices:
            lacks = [
                0 if device.name in held.holders_of(unit) else size
                for unit, size in enumerate(sizes)
            ]
            self._sums.append(np.concatenate(([0], np.cumsum(lacks))))

    def of(self, draft: Draft) -> int:
        """Bytes that must travel for `draft`."""
        total = 0
        for (first, end), group in zip(draft.units, draft.groups, strict=True):
            total += sum(int(self._sums[d][end] - self._sums[d][first]) for d in group.devices)
        return total

    def by_cuts(self, part: UnplacedGroup) -> Floats:
        """[L+1, L+1] bytes that a stage of those devices lacks of units [i, j)."""
        sums = sum((self._sums[device] for device in part.devices), start=np.zeros(1))
        return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)


def slowest_seconds(cuts: OrderCuts, order: Order, borders: Sequence[int]) -> float:
    """Seconds a micro-batch of the slowest stage or cut, all-reduce included."""
    slowest, ends = 0.0, 0.0
    for p, part in enumerate(order):
        at = borders[p], borders[p + 1]
        tables = cuts.tables(part)
        seconds = float(tables.seconds[at] + tables.reduce[at] / cuts.rounds)
        if cuts.private and p in (0, len(order) - 1):
            ends += seconds
        slowest = max(slowest, seconds)
        if p + 1 < len(order):
            slowest = max(slowest, _cut_rate(cuts, part, order[p + 1]) * cuts.carried[at[1]])
    return max(slowest, ends)


def _cut_rate(cuts: OrderCuts, before: UnplacedGroup, after: UnplacedGroup) -> float:
    there, back, _ = cuts.hop(before, after)
    return max(there, back)


def cheapest_borders(
    cuts: OrderCuts,
    missing: Missing,
    order: Order,
    limit_seconds: float,
    last_first: int,
    uneven_bytes: float = 0.0,
) -> tuple[int, ...] | None:
    """Borders of fewest missing bytes with no stage or cut slower than the limit.

    Arguments:
        uneven_bytes: so many bytes are as bad as a stage that takes all of the limit, and less by
            the square where it takes less: of cuts that move as much the evenest are best.
        last_first: with a private plan, where the last stage begins: the holder's two stages
            share its time, so one of them is fixed.
    """
    if cuts.private and len(order) > 1:
        tail = order[-1]
        end = len(cuts.carried) - 1
        taken = float(cuts.tables(tail).seconds[last_first, end])
        limits = limit_seconds, last_first, taken, uneven_bytes
        inner = _cheapest(cuts, missing, order[:-1], *limits)
        return None if inner is None else (*inner, end)
    limits = limit_seconds, len(cuts.carried) - 1, 0.0, uneven_bytes
    return _cheapest(cuts, missing, order, *limits)


def _cheapest(
    cuts: OrderCuts,
    missing: Missing,
    order: Order,
    limit: float,
    end: int,
    taken: float,
    uneven_bytes: float,
) -> tuple[int, ...] | None:
    """Of units 0..end-1; `taken` seconds of the first stage's device are used already."""
    bytes_from = np.full(end + 1, np.inf)  # [end+1] by first unit of the suffix
    bytes_from[end] = 0.0
    chosen = []
    for p in range(len(order) - 1, -1, -1):
        tables = cuts.tables(order[p])
        seconds = tables.seconds[: end + 1, : end + 1] + tables.reduce[: end + 1, : end + 1] / (
            cuts.rounds
        )
        need = missing.by_cuts(order[p])[: end + 1, : end + 1].copy()
        if uneven_bytes:
            need += uneven_bytes * np.square(seconds / limit)
        need[seconds > limit - (taken if p == 0 else 0.0)] = np.inf
        if p + 1 < len(order):
            rate = _cut_rate(cuts, order[p], order[p + 1])
            need[:, cuts.carried[: end + 1] * rate > limit] = np.inf
        total = need + bytes_from[None, :]
        cut = total.argmin(axis=1)
        chosen.append(cut)
        bytes_from = total[np.arange(end + 1), cut]
    if not np.isfinite(bytes_from[0]):
        return None
    borders = [0]
    for cut in reversed(chosen):
        borders.append(int(cut[borders[-1]]))
    return tuple(borders)
