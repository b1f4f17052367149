"""Every pipeline there is, simulated, the best ones climbed: the oracle for the search.

Every subset of devices, every ordered partition of it into groups, every border, both allocations,
shares started by speed and by memory. The fastest are then climbed by shares and by warm-up depths.
Deliberately plain: nothing is bounded, estimated or pruned, and no code is shared with the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups
from p2ptrain.plan.simulation.simulate import round_seconds
from p2ptrain.plan.types.allocation import Allocation, BatchSplit

CLIMBED = 12
"""Structures that are climbed, fastest first."""
Members = tuple[int, ...]


def ordered_groups(devices: Members, most: int) -> Iterator[tuple[Members, ...]]:
    """All sequences of at most `most` disjoint groups of some of `devices`."""
    if not most:
        return
    for size in range(1, len(devices) + 1):
        for first in combinations(devices, size):
            yield (first,)
            rest = tuple(device for device in devices if device not in first)
            for others in ordered_groups(rest, most - 1):
                yield (first, *others)


def layouts(
    cost: CostModel, *, private: bool, groups: bool
) -> Iterator[tuple[tuple[int, ...], tuple[Members, ...]]]:
    """(borders, members of each stage) over all subsets, ordered partitions and cuts."""
    units, holder = cost.unit_count, cost.holder
    inner = tuple(d for d in range(len(cost.devices)) if not (private and d == holder))
    ends = ((holder,),) if private else ()
    sequences = list(ordered_groups(inner, units))
    if private:
        sequences = [(), *sequences]
    for sequence in sequences:
        if not groups and any(len(members) > 1 for members in sequence):
            continue
        stages = (*ends, *sequence, *ends) if sequence else ends
        for cuts in combinations(range(1, units), len(stages) - 1):
            yield (0, *cuts, units), stages


def best_round_seconds(
    cost: CostModel,
    split: BatchSplit,
    *,
    private: bool = False,
    groups: bool = True,
    climbed: int = CLIMBED,
) -> tuple[float, Draft | None]:
    """The fastest round of all; inf where nothing fits."""
    found: dict[tuple[object, ...], tuple[float, Draft]] = {}
    for borders, stages in layouts(cost, private=private, groups=groups):
        for draft in _starts(cost, split, borders, stages):
            seconds = round_seconds(cost, draft)
            key = borders, stages, tuple(group.deals for group in draft.groups)
            if key not in found or seconds < found[key][0]:
                found[key] = seconds, draft
    if not found:
        return math.inf, None
    fastest = sorted(found.values(), key=lambda one: one[0])[:climbed]
    return min((_climbed(cost, *one) for one in fastest), key=lambda one: one[0])


def _starts(
    cost: CostModel, split: BatchSplit, borders: tuple[int, ...], stages: Sequence[Members]
) -> Iterator[Draft]:
    """Both allocations in every group; shares by speed, and by memory."""
    partial: list[tuple[StageGroup, ...]] = [()]
    for members, first, end in zip(stages, borders, borders[1:], strict=False):
        options = list(dict.fromkeys(_groups(cost, split, members, (first, end))))
        partial = [(*before, group) for before in partial for group in options]
    for groups in partial:
        draft = draft_groups(cost, split, borders, groups)
        if draft is not None:
            yield draft


def _groups(
    cost: CostModel, split: BatchSplit, members: Members, units: tuple[int, int]
) -> Iterator[StageGroup]:
    if len(members) == 1:
        yield StageGroup(members, (split.micro_batch,))
        return
    samples = split.first_samples
    speeds = [1 / max(sum(cost.stage_seconds(d, *units, samples)), 1e-12) for d in members]
    room = [cost.samples_that_fit(*units, cost.devices[d].memory_bytes) for d in members]
    for allocation, total in (
        (Allocation.SAMPLES, split.micro_batch),
        (Allocation.MICRO_BATCHES, split.micro_batches),
    ):
        for weights in (speeds, [max(0, min(each, split.batch_size)) for each in room]):
            shares = _proportional(total, weights)
            if shares is not None:
                yield StageGroup(members, shares, allocation)


def _proportional(total: int, weights: Sequence[float]) -> tuple[int, ...] | None:
    """Whole shares of at least 1, by largest remainder."""
    if total < len(weights) or not sum(weights):
        return None
    wanted = [total * weight / sum(weights) for weight in weights]
    shares = [max(1, int(part)) for part in wanted]
    while sum(shares) > total:
        shares[shares.index(max(shares))] -= 1
    while sum(shares) < total:
        gaps = [part - share for part, share in zip(wanted, shares, strict=True)]
        shares[gaps.index(max(gaps))] += 1
    return tuple(shares)


def _climbed(cost: CostModel, seconds: float, draft: Draft) -> tuple[float, Draft]:
    """Shares moved, members reordered and depths changed until nothing is faster."""
    improved = True
    while improved:
        improved = False
        for other in _changes(cost, draft):
            faster = round_seconds(cost, other)
            if faster < seconds * (1 - 1e-9):
                seconds, draft, improved = faster, other, True
                break
    return seconds, draft


def _changes(cost: CostModel, draft: Draft) -> Iterator[Draft]:
    count, stages = draft.split.micro_batches, len(draft.groups)
    for p, group in enumerate(draft.groups):
        for changed in _other_groups(group):
            groups = (*draft.groups[:p], changed, *draft.groups[p + 1 :])
            for wanted in (draft.warmup, None):
                other = draft_groups(cost, draft.split, draft.borders, groups, wanted)
                if other is not None:
                    yield other
    depths = [tuple(min(count, depth + more) for depth in draft.warmup) for more in (1, 2, 4)]
    depths += [tuple(min(count, depth * 2) for depth in draft.warmup), (count,) * stages]
    for p, step in product(range(stages), (-2, -1, 1, 2, 4)):
        depths.append(_levelled(draft.warmup, p, draft.warmup[p] + step))
    # One device's memory is shared by the ends of a private plan: less for one, more for the other.
    for less, more in product((1, 2, 4), repeat=2):
        shallower = _levelled(draft.warmup, 0, draft.warmup[0] - less)
        depths.append(_levelled(shallower, stages - 1, shallower[-1] + more))
    for wanted in depths:
        falling = all(a >= b for a, b in pairwise(wanted))
        if falling and wanted[-1] >= 1 and wanted[0] <= count and wanted != draft.warmup:
            other = draft_groups(cost, draft.split, draft.borders, draft.groups, wanted)
            if other is not None:
                yield other


def _levelled(depths: Sequence[int], p: int, level: int) -> tuple[int, ...]:
    """Stage p at that depth, those before it at least and those behind at most as deep."""
    before = (max(level, depth) for depth in depths[:p])
    return (*before, level, *(min(level, depth) for depth in depths[p + 1 :]))


def _other_groups(group: StageGroup) -> Iterator[StageGroup]:
    places = range(len(group.devices))
    for giver, taker in permutations(places, 2):
        for step in (1, 2, 4):
            if group.shares[giver] > step:
                shares = list(group.shares)
                shares[giver] -= step
                shares[taker] += step
                yield replace(group, shares=tuple(shares))
    for a, b in combinations(places, 2):
        order = list(places)
        order[a], order[b] = order[b], order[a]
        yield StageGroup(
            tuple(group.devices[i] for i in order),
            tuple(group.shares[i] for i in order),
            group.allocation,
        )
