"""Hill-climbing by simulation: one change at a time, as long as one helps and the budget lasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest

from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.candidates import whole_seconds
from p2ptrain.plan.problem.judge import WORTH, Judge, Judged
from p2ptrain.plan.search.fine_moves import fine_changes, other_depths
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.search.structure_moves import MAX_SPARE, coarse_changes

CHANGE_TASKS = 20
"""What drafting and bounding a change of a few devices costs, in simulated tasks."""

PAIR_TASKS = 0.06
"""And more for each pair of its devices, since bounds look at which pairs exchange samples."""

GAIN = 1 - 1e-4
"""A smaller gain is not worth another round of changes."""


def climb_fine(judge: Judge, drafter: Drafter, start: Judged, reserve_tasks: int) -> Judged:
    """`start` with shares, orders, borders and depths improved until nothing helps."""
    best = start
    while judge.budget_tasks > reserve_tasks:
        better = _best_depths(judge, best, reserve_tasks)
        changes = fine_changes(judge.cost, better.draft, drafter.question)
        better = _first_better(judge, better, changes, reserve_tasks)
        if better is best:
            break
        best = better
    return best


def climb_coarse(
    judge: Judge, drafter: Drafter, start: Judged, devices: Sequence[int], reserve_tasks: int
) -> Judged:
    """`start` with structure and then the rest improved until nothing helps."""
    best = start
    while judge.budget_tasks > reserve_tasks:
        changes = _restructured(drafter, best.draft, devices)
        better = _first_better(judge, best, changes, reserve_tasks)
        if better is best:
            break
        best = better
    return climb_fine(judge, drafter, best, reserve_tasks)


def spare_devices(drafter: Drafter, draft: Draft, devices: Sequence[int]) -> list[int]:
    """Of `devices` those that `draft` does not use and a change may bring in, the fastest first."""
    unused = [device for device in devices if device not in draft.devices]
    most = len(draft.devices) if drafter.question.is_wide else MAX_SPARE
    return nsmallest(most, unused, key=lambda d: (whole_seconds(drafter.judge.cost, d), d))


def _restructured(drafter: Drafter, draft: Draft, devices: Sequence[int]) -> Iterator[Draft]:
    spare = spare_devices(drafter, draft, devices)
    for borders, stages in coarse_changes(draft, spare, drafter.question):
        yield from drafter.drafts(draft.split, borders, stages)


def _first_better(
    judge: Judge, best: Judged, drafts: Iterable[Draft], reserve_tasks: int
) -> Judged:
    """The first draft that is faster, in order of their bounds; `best` where none is."""
    hopeful: dict[Draft, float] = {}
    for draft in drafts:
        judge.budget_tasks -= change_tasks(draft)
        bound = judge.bound(draft)
        if bound < best.seconds * GAIN:
            hopeful[draft] = bound
        if judge.budget_tasks <= reserve_tasks:
            break
    for draft in sorted(hopeful, key=lambda draft: hopeful[draft]):
        if judge.budget_tasks <= reserve_tasks:
            break
        seconds = judge.seconds(draft)
        if seconds < best.seconds * GAIN:
            return Judged(seconds, draft)
    return best


def _best_depths(judge: Judge, best: Judged, reserve_tasks: int) -> Judged:
    """The best depths one change away."""
    for draft in other_depths(judge.cost, best.draft):
        judge.budget_tasks -= change_tasks(draft)
        if judge.budget_tasks <= reserve_tasks:
            break
        worth = WORTH if sum(draft.warmup) > sum(best.draft.warmup) else GAIN
        if judge.bound(draft) < best.seconds * worth:
            seconds = judge.seconds(draft)
            if seconds < best.seconds * worth:
                best = Judged(seconds, draft)
    return best


def change_tasks(draft: Draft) -> int:
    return CHANGE_TASKS + int(PAIR_TASKS * len(draft.devices) ** 2)
