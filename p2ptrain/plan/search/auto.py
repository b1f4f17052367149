"""`auto`: the best plan of all planners, searched further, never slower than the best device alone.

It is the only planner that leaves devices out, and says of each what using it would cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest

from p2ptrain.errors import PlanError
from p2ptrain.plan.draft import Draft, split_usually
from p2ptrain.plan.search.annealing import annealed, annealing_tasks
from p2ptrain.plan.search.climb import climb_fine
from p2ptrain.plan.search.deferring import annealed_split, with_split
from p2ptrain.plan.search.divider import Divider
from p2ptrain.plan.search.drafting import Drafter
from p2ptrain.plan.search.leaner import leaner
from p2ptrain.plan.search.named import named_answers
from p2ptrain.plan.search.pipelines import PipelineSearch
from p2ptrain.plan.search.reasons import no_faster_than, no_gain, no_place, too_small
from p2ptrain.plan.search.straight import StraightSearch
from p2ptrain.plan.shared.infeasible import explain
from p2ptrain.plan.shared.judge import Judge, Judged
from p2ptrain.plan.shared.orders import whole_seconds
from p2ptrain.plan.shared.question import Answer, Question
from p2ptrain.plan.shared.rules import Rules
from p2ptrain.plan.work import Work

OVERDRAFT_TASKS = 12_000
"""Simulated tasks beyond the budget that the reasons may cost; then bounds must do."""
MOST_LOOKS = 3
"""How often a left-out device may turn out to help after all before the search ends."""
MOST_EXPLAINED = 16
"""Devices left out, the fastest, for each of which a plan that uses it is looked for."""
SEARCHED = "search"
"""What `found_by` says of a plan that no named planner found."""


@dataclass(frozen=True, slots=True)
class _Found:
    judged: Judged
    found_by: str


def plan_auto(question: Question) -> Answer:
    """The fastest plan found, with a reason for every device it leaves out."""
    rules = rules_of(question)
    named = _best_named(question, rules)
    search = _search(question, rules)
    searched = search.run(None if named is None else named.judged)
    best = named
    if searched is not None:
        best = _faster(best, _Found(question.judge.exact(searched.draft), SEARCHED))
    if best is None:
        raise PlanError(explain(question))
    split = with_split(question, rules, best.judged, lambda asked: _search(asked, rules))
    if split is not best.judged:
        best = _Found(split, SEARCHED)
    better = _annealed(question, rules, best.judged)
    best = _faster(best, _Found(better, SEARCHED))
    return _explained(question, search, best)


def rules_of(question: Question) -> Rules:
    """The question's constraints."""
    return Rules(
        holder=question.cost.holder,
        work=Work(question.cost.profile),
        private=question.private,
        required=question.required,
        caps=question.caps,
        groups=question.groups,
        allocations=question.allocations,
    )


def _search(question: Question, rules: Rules) -> PipelineSearch:
    judge, devices, splits = question.judge, question.devices, question.splits
    drafter = Drafter(judge, Divider(question.cost, rules))
    return PipelineSearch(question, drafter, StraightSearch(judge, devices, splits, rules))


def _annealed(question: Question, rules: Rules, best: Judged) -> Judged:
    """The best draft or a faster one, on a budget of its own; split if that one is."""
    tasks = annealing_tasks(question)
    if tasks == 0:
        return best
    if best.draft.held:
        return annealed_split(question, rules, best, tasks)
    judge = question.judge
    left, judge.budget_tasks = judge.budget_tasks, tasks
    found = annealed(question, rules, judge, best)
    judge.budget_tasks = left
    return judge.exact(found.draft)


def _best_named(question: Question, rules: Rules) -> _Found | None:
    best = None
    for name, judged in named_answers(question, rules):
        best = _faster(best, _Found(judged, name))
    return best


def _faster(best: _Found | None, other: _Found) -> _Found:
    return other if best is None or other.judged.beats(best.judged) else best


def _explained(question: Question, search: PipelineSearch, best: _Found) -> Answer:
    """With the best plan known for every device left out, which may turn out to be the best."""
    others: dict[int, Judged] = {}
    looked_at: list[int] = []
    for _ in range(MOST_LOOKS):
        looked_at = _fastest_unused(question, best.judged.draft)
        others = {
            device: min(judged, key=lambda one: one.seconds)
            for device in looked_at
            if (judged := _with_device(question, search, best.judged, device))
        }
        better = min(others.values(), key=lambda one: one.seconds, default=best.judged)
        if not better.beats(best.judged):
            break
        if not better.draft.held:  # changes would make it whole again
            better = climb_fine(question.judge, search.drafter, better, reserve_tasks=0)
        best = _faster(best, _Found(question.judge.exact(better.draft), SEARCHED))
    unused = [d for d in question.devices if d not in best.judged.draft.devices]
    reasons = {
        device: _reason(question, best.judged, device, others.get(device))
        if device in looked_at
        else _as_others(question, device, looked_at[0])
        for device in unused
    }
    return Answer(leaner(question.judge, best.judged).draft, reasons, best.found_by)


def _with_device(
    question: Question, search: PipelineSearch, best: Judged, device: int
) -> list[Judged]:
    """Plans that use `device`, judged; those that cannot win may only be bounded."""
    return [_worth(question.judge, best, draft) for draft in search.drafts_with(device, best)]


def _fastest_unused(question: Question, draft: Draft) -> list[int]:
    """The devices left out that are most likely to help after all, at most MOST_EXPLAINED."""
    unused = [device for device in question.devices if device not in draft.devices]
    return nsmallest(MOST_EXPLAINED, unused, key=lambda d: (whole_seconds(question.cost, d), d))


def _as_others(question: Question, device: int, fastest: int) -> str:
    """The reason of a device slower than all that were looked at."""
    small = too_small(question.cost, device, question.splits[0])
    return small or no_faster_than(question.cost, device, fastest)


def _worth(judge: Judge, best: Judged, draft: Draft) -> Judged:
    """Judged, or where the budget is long used up only bounded; split where the best one is."""
    if best.draft.held:
        draft = split_usually(judge.cost, draft)
    hopeless = judge.exhausted and judge.bound(draft) > best.seconds
    if hopeless or judge.budget_tasks < -OVERDRAFT_TASKS:
        return Judged(max(judge.bound(draft), best.seconds), draft)
    return judge.exact(draft)


def _reason(question: Question, best: Judged, device: int, other: Judged | None) -> str:
    if other is not None:
        return no_gain(question.cost, device, best, other)
    small = too_small(question.cost, device, question.splits[0])
    return small or no_place(question)
