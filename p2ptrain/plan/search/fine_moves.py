"""Small changes of a draft that leave its structure: shares, order in a group, depths, borders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, permutations

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups, usual_depths
from p2ptrain.plan.problem.question import Question

MAX_PERMUTED = 3
"""Devices of a group whose orders are all tried."""

MAX_LEVELLED = 6
"""Stages up to which one stage's depth takes its neighbours along."""

LEVELS = (-4, -2, -1, 1, 2, 4, 8)
"""By how much."""


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
