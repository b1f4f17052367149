"""`auto`: the best plan of all planners, searched further, never slower than the best device alone.

It is at least as good as each named planner's answer, is the only planner that leaves devices out,
and says of each what using it would cost.

A search follows time alone, and many warm-up depths have the same time. Fewer micro-batches in
flight need less memory for the same round, so depths beyond the usual ones must gain something. The
usual ones stay: they hide what the model of a cluster does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.draft import Draft, split_usually, usual_depths
from p2ptrain.plan.planners.data_parallel import best_singles, judge_dp
from p2ptrain.plan.planners.equal_shares import judge_pp
from p2ptrain.plan.planners.ftpipehd import judge_ftpipehd
from p2ptrain.plan.planners.hybrid import judge_hybrid
from p2ptrain.plan.planners.pipedream import judge_pipedream
from p2ptrain.plan.problem.candidates import fastest
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.left_out import as_others, reason
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.search.annealing import annealed, annealing_tasks
from p2ptrain.plan.search.climb import climb_fine
from p2ptrain.plan.search.pipelines import PipelineSearch
from p2ptrain.plan.search.zero_bubble import annealed_split, with_split

OVERDRAFT_TASKS = 12_000
"""Simulated tasks beyond the budget that the reasons may cost; then bounds must do."""

MAX_LOOKS = 3
"""How often a left-out device may turn out to help after all before the search ends."""

MAX_EXPLAINED = 16
"""Devices left out, the fastest, for each of which a plan that uses it is looked for."""

SEARCHED = "search"
"""What `found_by` says of a plan that no named planner found."""


@dataclass(frozen=True, slots=True)
class _FoundDraft:
    judged: Judged
    found_by: str


def plan_auto(question: Question) -> Answer:
    """The fastest plan found, with a reason for every device it leaves out."""
    named = _best_named(question)
    search = PipelineSearch.of(question)
    searched = search.run(None if named is None else named.judged)
    best = named
    if searched is not None:
        best = _faster(best, _FoundDraft(question.judge.exact(searched.draft), SEARCHED))
    if best is None:
        raise PlanError(explain(question))
    split = with_split(question, best.judged)
    if split is not best.judged:
        best = _FoundDraft(split, SEARCHED)
    better = _annealed(question, best.judged)
    best = _faster(best, _FoundDraft(better, SEARCHED))
    return _explained(question, search, best)


def _annealed(question: Question, best: Judged) -> Judged:
    """The best draft or a faster one, on a budget of its own; split if that one is."""
    tasks = annealing_tasks(question)
    if tasks == 0:
        return best
    if best.draft.held:
        return annealed_split(question, best, tasks)
    judge = question.judge
    left, judge.budget_tasks = judge.budget_tasks, tasks
    found = annealed(question, judge, best)
    judge.budget_tasks = left
    return judge.exact(found.draft)


def _best_named(question: Question) -> _FoundDraft | None:
    best = None
    for name, judged in planner_answers(question):
        best = _faster(best, _FoundDraft(judged, name))
    return best


def _faster(best: _FoundDraft | None, other: _FoundDraft) -> _FoundDraft:
    return other if best is None or other.judged.beats(best.judged) else best


def _explained(question: Question, search: PipelineSearch, best: _FoundDraft) -> Answer:
    """With the best plan known for every device left out, which may turn out to be the best."""
    others: dict[int, Judged] = {}
    looked_at: list[int] = []
    for _ in range(MAX_LOOKS):
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
        best = _faster(best, _FoundDraft(question.judge.exact(better.draft), SEARCHED))
    unused = [d for d in question.devices if d not in best.judged.draft.devices]
    reasons = {
        device: reason(question, best.judged, device, others.get(device))
        if device in looked_at
        else as_others(question, device, looked_at[0])
        for device in unused
    }
    return Answer(with_shallow_warmup(question.judge, best.judged).draft, reasons, best.found_by)


def _with_device(
    question: Question, search: PipelineSearch, best: Judged, device: int
) -> list[Judged]:
    """Plans that use `device`, judged; those that cannot win may only be bounded."""
    return [_worth(question.judge, best, draft) for draft in search.drafts_with(device, best)]


def _fastest_unused(question: Question, draft: Draft) -> list[int]:
    """The devices left out that are most likely to help after all, at most MAX_EXPLAINED."""
    unused = [device for device in question.devices if device not in draft.devices]
    return fastest(question.cost, unused, MAX_EXPLAINED)


def _worth(judge: Judge, best: Judged, draft: Draft) -> Judged:
    """Judged, or where the budget is long used up only bounded; split where the best one is."""
    if best.draft.held:
        draft = split_usually(judge.cost, draft)
    hopeless = judge.exhausted and judge.bound(draft) > best.seconds
    if hopeless or judge.budget_tasks < -OVERDRAFT_TASKS:
        return Judged(max(judge.bound(draft), best.seconds), draft)
    return judge.exact(draft)


EVERY_DEVICE_A_STAGE: Mapping[str, Callable[[Question], Judged | None]] = {
    "pp": judge_pp,
    "ftpipehd": judge_ftpipehd,
}
"""Planners that need as many units as devices."""

OTHERS: Mapping[str, Callable[[Question], Judged | None]] = {
    "dp": judge_dp,
    "hybrid": judge_hybrid,
    "pipedream": judge_pipedream,
}


def planner_answers(question: Question) -> Iterator[tuple[str, Judged]]:
    """(planner, its draft) of every named planner that has an answer which is allowed."""
    for name, judged in _every_answer(question):
        if question.allow(judged.draft):
            yield name, judged


def _every_answer(question: Question) -> Iterator[tuple[str, Judged]]:
    alone = (question.cost.holder,) if question.private else question.devices
    for judged in best_singles(question.judge, question.splits, alone).values():
        yield "single", judged
    stages = len(question.devices) + (question.private and len(question.devices) > 1)
    straight = EVERY_DEVICE_A_STAGE if stages <= question.cost.unit_count else {}
    for name, judge_named in {**straight, **OTHERS}.items():
        answer = judge_named(question)
        if answer is not None:
            yield name, answer


def with_shallow_warmup(judge: Judge, best: Judged) -> Judged:
    """`best`, its depths lowered towards the usual ones while that makes no round slower.

    One with split backwards stays: its memory is what it holds, not its depths.
    """
    draft = best.draft
    if draft.held:
        return best
    usual = usual_depths(draft.groups, draft.split.micro_batches, judge.cost.mode)
    least = replace(draft, warmup=tuple(map(min, usual, draft.warmup)))
    if least == draft:
        return best
    if _as_fast(judge, least, best):
        draft = least
    for p in reversed(range(len(draft.warmup))):  # the last first: no depth grows to the next
        draft = _lowered(judge, best, draft, p, least.warmup[p])
    found = judge.exact(draft)
    return best if best.beats(found) else found


def _lowered(judge: Judge, best: Judged, draft: Draft, p: int, usual: int) -> Draft:
    """`draft` with the depth of stage p lowered, found by halving, to `usual` at the lowest."""
    low = max((usual, *draft.warmup[p + 1 : p + 2]))
    while low < draft.warmup[p]:
        middle = (low + draft.warmup[p]) // 2
        other = replace(draft, warmup=(*draft.warmup[:p], middle, *draft.warmup[p + 1 :]))
        if _as_fast(judge, other, best):
            draft = other
        else:
            low = middle + 1
    return draft


def _as_fast(judge: Judge, draft: Draft, best: Judged) -> bool:
    """Whether `draft` is, simulated only where its bound leaves hope."""
    bounded = Judged(judge.bound(draft), draft)
    return not best.beats(bounded) and not best.beats(Judged(judge.seconds(draft), draft))
