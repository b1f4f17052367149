"""Candidates of the shapes that PipeDream publishes: many replicas in front, a short tail behind.

On equal devices the best plans often are 15-1 or 12-3-1 (SOSP 2019, table 1): nearly all devices
are replicas of the first stage, and the few parameters-heavy units at the end have a device or two.
Group sizes between powers of two are missing in `segments.py`; here every size of the first group
is possible, in any place of an order of the devices. For a shape, borders make the slowest stage or
link as fast as possible:

    A(j, p) = min over i of  max( A(i, p-1) , link(i) , stage p of units [i, j) )

with a stage's devices taking whole micro-batches by speed. Then borders move while that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, draft_groups
from p2ptrain.plan.problem.coarsen import useful_cuts
from p2ptrain.plan.problem.device_orders import segment_orders
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.micro_batch_sizes import even_window
from p2ptrain.plan.problem.partition import Floats, Partition, range_sums
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.balanced_groups import balanced_group
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.request import PlanMode

MIN_DEVICES, MAX_DEVICES = 7, 32
"""`segments.py` knows all groups of up to six; of more than MAX_DEVICES, a device more or less in
a group matters too little to be simulated."""

MAX_CUTS = 48
"""Places where a model may be cut first; then borders move unit by unit."""

ORDERS = 3
"""Orders of the devices, the likeliest."""

TAILS = ((), (1,), (2,), (1, 1), (3,), (2, 1), (1, 1, 1), (4,), (3, 1), (2, 2), (2, 1, 1))
"""Devices of the stages behind the first."""

SIMULATED = 8
"""Candidates, of least bounds."""

MOVED = 2
"""Of them, those whose borders are moved."""

INSTANT = 1e-12
"""Seconds (or their inverse) instead of none, so that speeds are finite."""

STEPS = (1, 2, 4)
"""By how many units at once."""


def replicated_candidates(question: Question, split: BatchSplit) -> list[Draft]:
    """Drafts of all shapes for one split, each in a window that its replicas share evenly.

    None of a private question, whose ends are the holder's, nor where stages may not deal.
    """
    devices = question.devices
    dealing = question.groups and Allocation.MICRO_BATCHES in question.allocations
    if question.private or not dealing:
        return []
    if not MIN_DEVICES <= len(devices) <= MAX_DEVICES:
        return []
    tables = _ReplicatedTables(question.cost, split)
    found: dict[Draft, None] = {}
    for order in segment_orders(question.cost, devices, MAX_DEVICES)[:ORDERS]:
        for shape in _shapes(len(order), question.cost.unit_count):
            draft = tables.drafted(order, shape)
            if draft is not None:
                found[draft] = None
    return list(found)


def best_replicated(question: Question, split: BatchSplit, reserve_tasks: int) -> Judged | None:
    """The fastest of them with borders moved, as far as the budget lasts."""
    judge = question.judge
    found: list[Judged] = []
    for draft in _unlike(judge, replicated_candidates(question, split))[:SIMULATED]:
        if not found or judge.budget_tasks > reserve_tasks:
            found.append(Judged(judge.seconds(draft), draft))
    found.sort(key=lambda judged: judged.seconds)
    ends = [_moved(judge, start, reserve_tasks) for start in found[:MOVED]]
    return min(ends, key=lambda judged: judged.seconds, default=None)


def _unlike(judge: Judge, drafts: Sequence[Draft]) -> list[Draft]:
    """Of each shape the draft of least bound, best first: on equal devices many are alike."""
    kept: dict[tuple[int, ...], Draft] = {}
    for draft in sorted(drafts, key=judge.bound):
        kept.setdefault(tuple(len(group.devices) for group in draft.groups), draft)
    return list(kept.values())


def _shapes(devices: int, units: int) -> Iterator[tuple[int, ...]]:
    """Devices of every stage: a first group and a tail, and straight ends behind a few of them."""
    for tail in TAILS:
        if sum(tail) < devices and len(tail) < units:
            yield (devices - sum(tail), *tail)
    for stages in range(max(2, devices - 6), min(devices, units) + 1):
        yield (1,) * stages
        if stages + 2 < devices and stages + 1 <= units:
            yield (*(1,) * stages, devices - stages)
        if stages + 4 <= devices and stages + 2 <= units:
            yield (*(1,) * stages, devices - stages - 1, 1)


class _ReplicatedTables:
    """Seconds of all stages of one split, between useful cuts."""

    def __init__(self, cost: CostModel, split: BatchSplit) -> None:
        self.cost, self.split = cost, split
        self.cuts = (0, *useful_cuts(cost, MAX_CUTS), cost.unit_count)
        self._partition = Partition(cost, split, cuts=self.cuts)
        summed = [float(cost.state(*bounds).summed_bytes) for bounds in pairwise(self.cuts)]
        self._summed = range_sums(np.array(summed))
        carried = [0.0, *(float(cost.cut_bytes(cut)) for cut in self.cuts[1:-1])]
        self._carried = split.first_samples * np.array(carried)
        steady = cost.mode is PlanMode.ASYNC
        self._rounds = 1.0 if steady else split.batch_size / split.first_samples
        self._steady = steady

    def drafted(self, order: Sequence[int], shape: Sequence[int]) -> Draft | None:
        """The shape on the first devices of an order; None where it does not fit."""
        ends = list(accumulate(shape))
        groups = [tuple(order[end - size : end]) for end, size in zip(ends, shape, strict=True)]
        borders = self._borders(groups)
        if borders is None:
            return None
        split = even_window(self.split, shape) if self._steady else self.split
        members = [
            balanced_group(self.cost, split, units, devices, Allocation.MICRO_BATCHES)
            for devices, units in zip(groups, pairwise(borders), strict=True)
        ]
        found = [group for group in members if group is not None]
        if len(found) < len(members):
            return None
        return draft_groups(self.cost, split, borders, found)

    def _borders(self, groups: Sequence[tuple[int, ...]]) -> list[int] | None:
        """Of the least slowest stage or link; of those, of the least sum of squares. As units."""
        stages = [self._stage(devices) for devices in groups]
        links = [self._link(*pair) for pair in pairwise(groups)]
        slowest, _ = _folded(stages, links, np.maximum)
        if not np.isfinite(slowest):
            return None
        allowed = slowest * (1 + 1e-9)
        stages, links = (
            [np.where(seconds <= allowed, seconds * seconds, np.inf) for seconds in listed]
            for listed in (stages, links)
        )
        _, places = _folded(stages, links, np.add)
        return [self.cuts[place] for place in places]

    def _stage(self, devices: tuple[int, ...]) -> Floats:
        """[C, C+1] seconds that a group is busy, or exchanges gradients, in a round."""
        each_alone = np.stack([self._partition.stage(device)[0] for device in devices])
        together = (1 / np.maximum(each_alone, INSTANT)).sum(axis=0)
        possible = np.isfinite(each_alone).all(axis=0)
        work = np.where(possible, self._rounds / np.maximum(together, INSTANT), np.inf)
        if len(devices) == 1:
            return work
        summing = self.cost.all_reduce_seconds(devices, 0, self.cost.unit_count)
        each = summing / max(1, self.cost.state(0, self.cost.unit_count).summed_bytes)
        reduce = each * np.where(possible, self._summed, 0.0)
        seconds: Floats = np.maximum(work, reduce / len(devices)) if self._steady else work + reduce
        return seconds

    def _link(self, before: tuple[int, ...], devices: tuple[int, ...]) -> Floats:
        """[C] seconds that the links between two groups are occupied, the busier direction."""
        rate = float(self.cost.links.rates[np.ix_(before, devices)].max())
        occupied: Floats = self._rounds * self._carried / rate / min(len(before), len(devices))
        return occupied


def _folded(
    stages: Sequence[Floats], links: Sequence[Floats], join: np.ufunc
) -> tuple[float, list[int]]:
    """(least value, borders) of stages [C, C+1] and links [C] joined."""
    best = stages[0][0]  # [C+1] by end
    choices = []
    for stage, link in zip(stages[1:], links, strict=True):
        total = join(join(best[:-1], link)[:, None], stage)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    places = [len(best) - 1]
    for choice in reversed(choices):
        places.append(int(choice[places[-1]]))
    return float(best[-1]), [0, *places[::-1]]


def _moved(judge: Judge, best: Judged, reserve_tasks: int) -> Judged:
    """`best` with one border after the other moved while that is faster."""
    while (better := _one_better(judge, best, reserve_tasks)) is not None:
        best = better
    return best


def _one_better(judge: Judge, best: Judged, reserve_tasks: int) -> Judged | None:
    for draft in sorted(_neighbours(judge.cost, best.draft), key=judge.bound):
        if judge.budget_tasks <= reserve_tasks or judge.bound(draft) >= best.seconds:
            break
        seconds = judge.seconds(draft)
        if seconds < best.seconds:
            return Judged(seconds, draft)
    return None


def _neighbours(cost: CostModel, draft: Draft) -> Iterator[Draft]:
    for p, (before, border, after) in enumerate(
        zip(draft.borders, draft.borders[1:], draft.borders[2:], strict=False), 1
    ):
        for step in (sign * step for step in STEPS for sign in (-1, 1)):
            if before < border + step < after:
                borders = (*draft.borders[:p], border + step, *draft.borders[p + 1 :])
                moved = draft_groups(cost, draft.split, borders, draft.groups)
                if moved is not None:
                    yield moved
