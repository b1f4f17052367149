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
from heapq import nsmallest
from itertools import pairwise, permutations, product

from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, device_loads, split_usually, usual_depths
from p2ptrain.plan.planners.data_parallel import best_singles, judge_dp
from p2ptrain.plan.planners.equal_shares import judge_pp
from p2ptrain.plan.planners.ftpipehd import judge_ftpipehd
from p2ptrain.plan.planners.hybrid import judge_hybrid
from p2ptrain.plan.planners.pipedream import judge_pipedream
from p2ptrain.plan.problem.candidates import whole_seconds
from p2ptrain.plan.problem.infeasible import explain, unit_bytes
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.search.annealing import annealed, annealing_tasks
from p2ptrain.plan.search.climb import climb_fine
from p2ptrain.plan.search.pipelines import PipelineSearch
from p2ptrain.plan.search.zero_bubble import annealed_split, with_split
from p2ptrain.plan.simulation.bound import mini_batches_each, round_interfaces
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.request import PlanMode

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
        device: _reason(question, best.judged, device, others.get(device))
        if device in looked_at
        else _as_others(question, device, looked_at[0])
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
    return nsmallest(MAX_EXPLAINED, unused, key=lambda d: (whole_seconds(question.cost, d), d))


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


SAME = 1.005
"""Rounds within half a per cent are called equally fast."""

PRIVATE_UNITS = 3
"""Fewest with which something lies between the holder's first unit and its last."""


def too_small(cost: CostModel, device: int, split: BatchSplit) -> str | None:
    """The reason, where the device cannot hold any unit."""
    samples = split.first_samples
    least = min(unit_bytes(cost, unit, samples) for unit in range(cost.unit_count))
    memory = cost.devices[device].memory_bytes
    if memory >= least:
        return None
    return (
        f"its memory for layers, {size_text(memory)}, holds none: the smallest needs "
        f"{size_text(least)}"
    )


def no_place(question: Question) -> str:
    """The reason, where no plan was found that uses a device which could hold some unit."""
    units = question.cost.unit_count
    if question.private and units < PRIVATE_UNITS:
        holder = question.cost.name(question.cost.holder)
        return (
            f"--private keeps the first and the last layers on {holder}, and there are none between"
        )
    broken = ", or breaks a --cap" if question.caps else ""
    return f"every plan found with it needs more memory than a device in it has{broken}"


def no_gain(cost: CostModel, device: int, best: Judged, other: Judged) -> str:
    """The reason, where `other` is the best plan found that uses the device."""
    before, after = _time(best.seconds), _time(other.seconds)
    what = _what(cost)
    blame = _blame(cost, device, other)
    if other.seconds <= best.seconds * SAME:
        return f"with it {what} would take no less than {before}, because {blame}"
    return f"with it {what} would take {after} instead of {before}, because {blame}"


def no_faster_than(cost: CostModel, device: int, other: int) -> str:
    """The reason, where plans with faster devices left out too, such as `other`, were looked at."""
    times = whole_seconds(cost, device) / max(whole_seconds(cost, other), 1e-300)
    name = cost.name(other)
    if times >= SAME:
        return f"it computes {times:.1f} times slower than {name}, which is not used either"
    return f"it computes no faster than {name}, which is not used either"


def _what(cost: CostModel) -> str:
    """What is timed."""
    return "a step" if cost.mode is PlanMode.SYNC else "a batch"


def _each_round(cost: CostModel) -> str:
    """How often a group's gradients are summed; asynchronously it depends on how they share."""
    return " in each step" if cost.mode is PlanMode.SYNC else ""


def _blame(cost: CostModel, device: int, other: Judged) -> str:
    """What the device's time goes into in a plan that uses it."""
    draft = other.draft
    rounds = draft.split.batch_size / draft.split.first_samples
    busiest = round_interfaces(cost, draft).of(device)
    rate, latency = _slowest_link(cost, device, draft)
    summing = _all_reduce(cost, device, draft)
    computing = device_loads(cost, draft)[device]
    exchanged = summing * _exchanges(cost, device, draft)
    if exchanged > max(busiest, latency * rounds, computing):
        return (
            f"summing its gradients with other devices' takes {_time(summing)}{_each_round(cost)}"
        )
    if max(busiest, latency * rounds) > computing:
        if latency * rounds > busiest:
            return f"its network answers only after {_time(latency)}"
        return f"its network carries only {size_text(rate)}/s"
    return _slowness(cost, device, other)


def _exchanges(cost: CostModel, device: int, draft: Draft) -> float:
    """How often the device's group sums gradients in a round, or in a window of mini-batches."""
    if cost.mode is PlanMode.SYNC:
        return 1.0
    each = [mini_batches_each(group) for group in draft.groups if device in group.devices]
    return draft.split.micro_batches / min(each)


def _all_reduce(cost: CostModel, device: int, draft: Draft) -> float:
    """Seconds that the sum of gradients takes in the device's group."""
    return max(
        cost.all_reduce_seconds(group.devices, *units)
        for group, units in zip(draft.groups, draft.units, strict=True)
        if device in group.devices
    )


def _slowest_link(cost: CostModel, device: int, draft: Draft) -> tuple[float, float]:
    """(bytes/s, seconds) of the worst links that the device uses in that plan."""
    pairs = {(cost.holder, fed) for p in (0, -1) for fed in draft.groups[p].devices}
    for before, after in pairwise(draft.groups):
        for here, there in product(before.devices, after.devices):
            pairs |= {(here, there), (there, here)}
    for group in draft.groups:
        pairs |= set(permutations(group.devices, 2))
    links = [cost.link(*pair) for pair in pairs if device in pair and pair[0] != pair[1]]
    rates = [link.bytes_per_s for link in links]
    return min(rates, default=float("inf")), max((link.latency_s for link in links), default=0.0)


def _slowness(cost: CostModel, device: int, other: Judged) -> str:
    fastest = min(other.draft.devices, key=lambda d: whole_seconds(cost, d))
    slowdown = whole_seconds(cost, device) / max(whole_seconds(cost, fastest), 1e-300)
    if slowdown >= 1.5:
        return f"it computes {slowdown:.1f} times slower than {cost.name(fastest)}"
    return "sending data takes more time than sharing the work saves"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms"
