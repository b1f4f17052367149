"""The order in which a group's buckets are all-reduced, and the unit where that order turns.

A backward makes the gradients of the last units first, and they are reduced while it runs. What the
wire has not begun when the backward ends goes in the order in which the next round's forward needs
it, the first units' first, and that forward waits unit by unit (P3, Jayarajan et al., MLSys 2019).
A stage of units 0 to 5, whose wire has begun with unit 3 when the backward ends:

    compute   B5 B4 B3 B2 B1 B0 | F0   F1 F2 F3 F4 F5
    wire         [ 5  ][ 4  ][ 3  ][0][1][2]               turn = 3
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.cost.overlap import CostBucket
from p2ptrain.plan.cost.ring import ring_seconds


def allreduce_turn(cost: CostModel, draft: Draft, p: int) -> int | None:
    """The unit before which stage p's sums turn; None: rounds wait for all sums.

    They wait where updates do, and where a device waits for another stage of its own.
    """
    group, (first, end) = draft.groups[p], draft.units[p]
    if cost.overlap is None or len(group.devices) == 1 or draft.shared_ends:
        return None
    if not cost.goes_ahead(draft.devices):
        return None
    buckets = cost.overlap.buckets(first, end, cost.bucket_sizes(group.devices))
    backward, made = _last_backward(cost, draft, p, buckets)
    seconds_per_byte = _seconds_per_byte(cost, group.devices)
    turn, free = end, 0.0
    for bucket, when in zip(buckets, made, strict=True):
        begins = max(free, when)
        if bucket.first == first or begins >= backward:
            break
        turn, free = bucket.first, begins + bucket.summed_bytes * seconds_per_byte
    return turn


@dataclass(frozen=True, slots=True)
class SentSums:
    """What a stage's group sums in a round.

    Attributes:
        early: of the buckets, those that are sent as the backward makes them; others at its end.
        turns: whether the order turns; else all of them are early.
    """

    buckets: tuple[CostBucket, ...]
    early: int
    turns: bool


def sent_in(cost: CostModel, draft: Draft, p: int) -> SentSums:
    """Stage p's, in a model with overlap."""
    assert cost.overlap is not None
    (first, end), turn = draft.units[p], allreduce_turn(cost, draft, p)
    sizes = cost.bucket_sizes(draft.groups[p].devices)
    if turn is None:
        buckets = cost.overlap.buckets(first, end, sizes)
        return SentSums(buckets, len(buckets), turns=False)
    early = cost.overlap.buckets(turn, end, sizes) if turn < end else ()
    buckets = (*early, *cost.overlap.turned_buckets(first, turn, sizes)) or (CostBucket(0, first),)
    return SentSums(buckets, len(early), turns=True)


def _last_backward(
    cost: CostModel, draft: Draft, p: int, buckets: tuple[CostBucket, ...]
) -> tuple[float, list[float]]:
    """(Seconds of the longest last backward, when in it each bucket is made)."""
    (first, end), group = draft.units[p], draft.groups[p]
    slowest: list[float] = [0.0]
    for place, device in enumerate(group.devices):
        pieces = [*group.piece_counts(draft.split, place)]
        if not pieces:
            continue
        times = cost.unit_times(device, pieces[-1])
        units = times.weight if draft.splits(p) and any(times.weight) else times.backward
        made = [sum(units[bucket.first : end]) for bucket in buckets] + [sum(units[first:end])]
        slowest = max(slowest, made, key=lambda of: of[-1])
    return slowest[-1], slowest[:-1] or [0.0] * len(buckets)


def _seconds_per_byte(cost: CostModel, devices: tuple[int, ...]) -> float:
    """Of a bucket's bytes on their way round the ring."""
    rate = min(link.bytes_per_s for link in cost.ring_links(devices))
    return ring_seconds(len(devices), 1.0, rate)
