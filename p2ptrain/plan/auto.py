"""`auto`: the best plan of all planners, never slower than the best device alone.

It is the only planner that leaves devices out, and says of each what using it would cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from p2ptrain.errors import PlanError
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.equal_shares import judge_pp
from p2ptrain.plan.infeasible import explain
from p2ptrain.plan.judge import Judge, Judged
from p2ptrain.plan.neighbours import neighbours
from p2ptrain.plan.planner import Answer, Question
from p2ptrain.plan.reasons import no_gain, too_small
from p2ptrain.plan.single import best_singles
from p2ptrain.plan.straight import StraightSearch

OVERDRAFT_TASKS = 12_000
"""Simulated tasks beyond the budget that the reasons may cost; then bounds must do."""
FEW = 4
"""Changes looked at for each device left out once the budget is used up."""
MOST_SECOND_LOOKS = 3
"""How often a left-out device may turn out to help after all before the search ends."""


@dataclass(frozen=True, slots=True)
class _Found:
    judged: Judged
    found_by: str


def plan_auto(question: Question) -> Answer:
    """The fastest plan found, with a reason for every device it leaves out."""
    search = StraightSearch(
        question.judge, question.devices, question.splits, private=question.private
    )
    best = _fastest(question, search)
    for _ in range(MOST_SECOND_LOOKS):
        others = _alternatives(question, search, best.judged)
        better = _best_of_found(best, others.values())
        if better is best:
            break
        best = better
    reasons = {
        device: _reason(question, best.judged, device, others.get(device))
        for device in question.devices
        if device not in best.judged.draft.devices
    }
    return Answer(best.judged.draft, reasons, best.found_by)


def _fastest(question: Question, search: StraightSearch) -> _Found:
    judge = question.judge
    alone = (question.cost.holder,) if question.private else question.devices
    singles = best_singles(judge, question.splits, alone).values()
    best = [_Found(judged, "single") for judged in singles]
    pp = judge_pp(question) if _pp_possible(question) else None
    if pp is not None:
        best.append(_Found(pp, "pp"))
    found = min(best, key=lambda one: one.judged.seconds, default=None)
    straight = search.run(None if found is None else found.judged)
    if straight is not None and (found is None or straight.draft != found.judged.draft):
        found = _faster(found, _Found(judge.exact(straight.draft), "straight"))
    if found is None:
        raise PlanError(explain(question))
    return found


def _faster(best: _Found | None, other: _Found) -> _Found:
    return other if best is None or other.judged.seconds < best.judged.seconds else best


def _pp_possible(question: Question) -> bool:
    return len(question.devices) + question.private <= question.cost.unit_count


def _alternatives(question: Question, search: StraightSearch, best: Judged) -> dict[int, Judged]:
    """For every device left out that could be used: the best plan known that uses it.

    Once the budget is used up, the best few are only bounded, which is enough for a reason.
    """
    judge, others = question.judge, {}
    known = _best_by_device(search)
    for device in question.devices:
        if device in best.draft.devices:
            continue
        drafts = [*known.get(device, ()), *_with_device(question, best, device)]
        shared = [draft for draft in drafts if len(draft.devices) > 1] or drafts
        if shared:
            others[device] = _worth(judge, best, min(shared, key=judge.bound))
    return others


def _worth(judge: Judge, best: Judged, draft: Draft) -> Judged:
    hopeless = judge.exhausted and judge.bound(draft) > best.seconds
    if hopeless or judge.budget_tasks < -OVERDRAFT_TASKS:
        return Judged(max(judge.bound(draft), best.seconds), draft)
    return judge.exact(draft)


def _best_by_device(search: StraightSearch) -> dict[int, list[Draft]]:
    """Of the search's drafts, the one of least bound for every device."""
    best: dict[int, list[Draft]] = {}
    shared = (draft for draft in search.pool if len(draft.devices) > 1)
    for draft in sorted(shared, key=search.judge.bound):
        for device in draft.devices:
            best.setdefault(device, [draft])
    return best


def _with_device(question: Question, best: Judged, device: int) -> Iterator[Draft]:
    judge = question.judge
    changes = neighbours(best.draft, [device], private=question.private)
    placements = (placement for placement in changes if device in placement[1])
    for placement in islice(placements, FEW if judge.exhausted else None):
        yield from judge.drafted(best.draft.split, *placement)


def _best_of_found(best: _Found, others: Iterable[Judged]) -> _Found:
    for other in others:
        best = _faster(best, _Found(other, "straight"))
    return best


def _reason(question: Question, best: Judged, device: int, other: Judged | None) -> str:
    if other is not None:
        return no_gain(question.cost, device, best, other)
    small = too_small(question.cost, device, question.splits[0])
    return small or "no plan found that gives it a stage fits the memory of all devices in it"
