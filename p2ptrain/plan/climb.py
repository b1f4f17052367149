"""Hill-climbing by simulation: small changes, as long as one helps and the budget lasts."""

from __future__ import annotations

from collections.abc import Iterable

from p2ptrain.plan.draft import Draft
from p2ptrain.plan.fine import fine_changes, other_depths
from p2ptrain.plan.judge import WORTH, Judge, Judged
from p2ptrain.plan.rules import Rules

CHANGE_TASKS = 20
"""What drafting and bounding a change costs, in simulated tasks."""
GAIN = 1 - 1e-4
"""A smaller gain is not worth another round of changes."""


def climb_fine(judge: Judge, rules: Rules, start: Judged, reserve_tasks: int) -> Judged:
    """`start` with shares, orders, borders and depths improved until nothing helps."""
    best = start
    while judge.budget_tasks > reserve_tasks:
        better = _deeper(judge, best, reserve_tasks)
        changes = fine_changes(judge.cost, better.draft, rules)
        better = first_better(judge, better, changes, reserve_tasks)
        if better is best:
            break
        best = better
    return best


def first_better(
    judge: Judge, best: Judged, drafts: Iterable[Draft], reserve_tasks: int
) -> Judged:
    """The first draft that is faster, in order of their bounds; `best` where none is."""
    hopeful = []
    for draft in dict.fromkeys(drafts):
        judge.budget_tasks -= CHANGE_TASKS
        if judge.bound(draft) < best.seconds * GAIN:
            hopeful.append(draft)
    for draft in sorted(hopeful, key=judge.bound):
        if judge.budget_tasks <= reserve_tasks:
            break
        if judge.seconds(draft) < best.seconds * GAIN:
            return Judged(judge.seconds(draft), draft)
    return best


def _deeper(judge: Judge, best: Judged, reserve_tasks: int) -> Judged:
    """The best depths one change away; deeper ones must be worth their memory."""
    start = best
    for draft in other_depths(judge.cost, start.draft):
        judge.budget_tasks -= CHANGE_TASKS
        worth = WORTH if sum(draft.warmup) > sum(best.draft.warmup) else GAIN
        if judge.bound(draft) < best.seconds * worth and judge.budget_tasks > reserve_tasks:
            seconds = judge.seconds(draft)
            if seconds < best.seconds * worth:
                best = Judged(seconds, draft)
    return best
