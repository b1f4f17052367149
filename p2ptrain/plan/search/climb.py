"""Hill-climbing by simulation: one change at a time, as long as one helps and the budget lasts.

Small changes leave a draft's structure: shares, order in a group, depths, borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, permutations

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups, usual_depths
from p2ptrain.plan.problem.candidates import fastest
from p2ptrain.plan.problem.judge import WORTH, Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.search.structure_moves import MAX_SPARE, coarse_changes

CHANGE_TASKS = 20
"""What drafting and bounding a change of a few devices costs, in simulated tasks."""

PAIR_TASKS = 0.06
"""And more for each pair of its devices, since bounds look at which pairs exchange samples."""

GAIN = 1 - 1e-4
"""A smaller gain is not worth another round of changes."""

MAX_PERMUTED = 3
"""Devices of a group whose orders are all tried."""

MAX_LEVELLED = 6
"""Stages up to which one stage's depth takes its neighbours along."""

LEVELS = (-4, -2, -1, 1, 2, 4, 8)
"""By how much."""


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
    return fastest(drafter.judge.cost, unused, most)


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
    """What drawing or listing a change of it, and bounding that, costs in simulated tasks."""
    return CHANGE_TASKS + int(PAIR_TASKS * len(draft.devices) ** 2)


def fine_changes(cost: CostModel, draft: Draft, question: Question) -> Iterator[Draft]:
    """Drafts one small change away that fit memory and `question`."""
    for borders, groups in changed_layouts(draft):
        changed = draft_groups(cost, draft.split, borders, groups, wanted_depths(draft, groups))
        if changed is not None and question.allow(changed):
            yield changed


def other_depths(cost: CostModel, draft: Draft) -> Iterator[Draft]:
    """The same layout with other warm-up depths, of one stage or of all."""
    for depths in dict.fromkeys(_depths(draft)):
        changed = draft_groups(cost, draft.split, draft.borders, draft.groups, depths)
        if changed is not None and changed.warmup != draft.warmup:
            yield changed


def wanted_depths(draft: Draft, groups: tuple[StageGroup, ...]) -> tuple[int, ...]:
    """For changed groups: the same depths, or where stages differ as much beyond the usual."""
    count = draft.split.micro_batches
    usual = usual_depths(groups, count)
    if len(groups) == len(draft.groups):
        return tuple(max(pair) for pair in zip(usual, draft.warmup, strict=True))
    before = usual_depths(draft.groups, count)
    more = max(0, *(now - then for now, then in zip(draft.warmup, before, strict=True)))
    return tuple(min(count, depth + more) for depth in usual)


def changed_layouts(draft: Draft) -> Iterator[tuple[tuple[int, ...], tuple[StageGroup, ...]]]:
    """Borders and groups with another share, one border moved by a unit, or a group reordered."""
    for p, group in enumerate(draft.groups):
        if len(group.devices) > 1:
            for changed in chain(_changed_shares(group), _reordered(group)):
                yield draft.borders, (*draft.groups[:p], changed, *draft.groups[p + 1 :])
    for p, q in permutations(range(len(draft.groups)), 2):
        if abs(p - q) == 1:
            for changed in _aligned(draft.groups[p], draft.groups[q]):
                if changed != draft.groups[p]:
                    yield draft.borders, (*draft.groups[:p], changed, *draft.groups[p + 1 :])
    for p in range(1, len(draft.borders) - 1):
        for border in (draft.borders[p] - 1, draft.borders[p] + 1):
            if draft.borders[p - 1] < border < draft.borders[p + 1]:
                yield (*draft.borders[:p], border, *draft.borders[p + 1 :]), draft.groups


def _changed_shares(group: StageGroup) -> Iterator[StageGroup]:
    """Some of one device's share to another."""
    total = sum(group.shares)
    for step in dict.fromkeys((1, 2, max(1, total // 16), max(1, total // 6), max(1, total // 3))):
        for giver, taker in permutations(range(len(group.devices)), 2):
            if group.shares[giver] > step:
                shares = list(group.shares)
                shares[giver] -= step
                shares[taker] += step
                yield replace(group, shares=tuple(shares))


def _reordered(group: StageGroup) -> Iterator[StageGroup]:
    """Other orders of a small group; in a large one two neighbours change places."""
    count = len(group.devices)
    if count <= MAX_PERMUTED:
        orders = list(permutations(range(count)))[1:]
    else:
        orders = [(*range(i), i + 1, i, *range(i + 2, count)) for i in range(count - 1)]
    for order in orders:
        yield StageGroup(
            tuple(group.devices[k] for k in order),
            tuple(group.shares[k] for k in order),
            group.allocation,
        )


def _aligned(one: StageGroup, other: StageGroup) -> Iterator[StageGroup]:
    """`one` dealing in the same turns as `other`, so that always the same two meet."""
    count = len(one.shares)
    if one.deals and other.deals and count == len(other.shares) and count <= MAX_PERMUTED:
        for order in permutations(range(count)):
            yield StageGroup(tuple(one.devices[k] for k in order), other.shares, one.allocation)


def changed_depths(draft: Draft) -> Iterator[tuple[int, ...]]:
    """All depths that `other_depths` tries, and levelled ones, whether they fit or not."""
    yield from dict.fromkeys([*_depths(draft), *_levelled(draft)])


def _depths(draft: Draft) -> Iterator[tuple[int, ...]]:
    count, now = draft.split.micro_batches, draft.warmup
    stages = len(now)
    together = [tuple(stages - p for p in range(stages))]
    together += [tuple(min(count, max(1, depth + n)) for depth in now) for n in (-1, 1, 2, 4)]
    together += [tuple(min(count, 2 * depth) for depth in now), (count,) * stages]
    for depths in together:
        if draft.shared_ends:  # the last stage's depth delays the first stage's tasks
            yield (*depths[:-1], min(depths[-2], now[-1]))
        yield depths
    for p in range(stages):
        if now[p] < (now[p - 1] if p else count):
            yield (*now[:p], now[p] + 1, *now[p + 1 :])
        if now[p] > (now[p + 1] if p + 1 < stages else 1):
            yield (*now[:p], now[p] - 1, *now[p + 1 :])


def _levelled(draft: Draft) -> Iterator[tuple[int, ...]]:
    """One stage's depth changed, those before it at least and those behind at most as deep.

    And all stages up to one deeper together: one alone would wait for the next.
    """
    count, now = draft.split.micro_batches, draft.warmup
    if not 1 < len(now) <= MAX_LEVELLED:
        return
    if draft.shared_ends:
        yield from _traded(now)
    for p, depth in enumerate(now):
        for level in (*(depth + more for more in LEVELS), count):
            if 1 <= level <= count:
                before, behind = now[:p], now[p + 1 :]
                yield (
                    *(max(level, other) for other in before),
                    level,
                    *(min(level, other) for other in behind),
                )
        for more in LEVELS:
            if more > 0 and p + 1 < len(now):
                yield (*(min(count, other + more) for other in now[: p + 1]), *now[p + 1 :])


def _traded(now: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The first stage shallower and the last deeper: they share one device's memory."""
    for less in (1, 2, 4):
        for more in (1, 2, 4):
            first, last = now[0] - less, now[-1] + more
            if last <= first:
                yield (first, *(max(last, min(first, depth)) for depth in now[1:-1]), last)
