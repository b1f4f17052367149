"""A group's all-reduce: in which order its buckets go, and the sums under way when a round ends.

A backward makes the gradients of the last units first, and they are reduced while it runs. What the
wire has not begun when the backward ends goes in the order in which the next round's forward needs
it, the first units' first, and that forward waits unit by unit (P3, Jayarajan et al., MLSys 2019).
A stage of units 0 to 5, whose wire has begun with unit 3 when the backward ends:

    compute   B5 B4 B3 B2 B1 B0 | F0   F1 F2 F3 F4 F5
    wire         [ 5  ][ 4  ][ 3  ][0][1][2]               turn = 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.cost.overlap import CostBucket
from p2ptrain.plan.simulation.engine import Lane, TransferRoute
from p2ptrain.plan.types.gradient_sums import ring_seconds, ring_steps


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


@dataclass(frozen=True, slots=True)
class LaneSums:
    """What its all-reduce costs a lane, and what its next round waits for.

    Attributes:
        each: seconds of its core for the messages of each bucket.
        offsets: where the next round may begin before the sums are there: seconds of its first
            forward before each bucket's units; else empty.
        parts: of all gradients, by bucket.
    """

    each: Sequence[float] = ()
    offsets: Sequence[float] = ()
    parts: Sequence[float] = ()

    @property
    def all(self) -> float:
        """Of every bucket."""
        return sum(self.each)

    @property
    def last(self) -> float:
        """Of the last one."""
        return sum(self.each[-1:])


def ring_of(cost: CostModel, draft: Draft, p: int, lanes: Sequence[Lane]) -> StageRing:
    sent = sent_in(cost, draft, p)
    return StageRing(cost, draft.units[p], lanes, sent.buckets, sent.early, turns=sent.turns)


@dataclass(frozen=True, slots=True)
class StageRing:
    """The lanes of a stage, and the gradients that they sum.

    Attributes:
        early: of the buckets, those that are sent as the backward makes them; others at its end.
        turns: whether the next round begins before the sums are there.
    """

    cost: CostModel
    units: tuple[int, int]
    lanes: Sequence[Lane]
    buckets: Sequence[CostBucket]
    early: int
    turns: bool

    @property
    def working(self) -> list[Lane]:
        """Those that have a part in the round."""
        return [lane for lane in self.lanes if lane.tasks]

    @property
    def cuts(self) -> list[int]:
        """Task numbers above those of the round: one a bucket, and one for what follows them."""
        above = len(self.lanes[0].seconds)
        return [above + 2 * k + 1 for k in range(len(self.buckets) + 1)]

    def ways(self, place: int, collector: int) -> list[TransferRoute]:
        """How each bucket travels from the lane at `place` to the next."""
        lane, after = self.lanes[place], self.lanes[(place + 1) % len(self.lanes)]
        links = self.cost.ring_links([one.device for one in self.lanes])
        up, down = self.cost.interfaces(lane.device, after.device)
        count, rate = len(self.lanes), min(link.bytes_per_s for link in links)
        return [
            TransferRoute(
                carries="sum",
                sender=lane.number,
                receiver=collector,
                uplink=up,
                downlink=down,
                seconds=ring_seconds(count, bucket.summed_bytes, rate),
                latency_s=ring_steps(count) * max(link.latency_s for link in links),
            )
            for bucket in self.buckets
        ]

    def sums(self, lane: Lane) -> LaneSums:
        """What they cost that lane."""
        assert self.cost.overlap is not None
        of = self.cost.overlap.reduce_seconds
        each = [of(lane.device, len(self.lanes), [bucket]) for bucket in self.buckets]
        if not self.turns or not lane.tasks:
            return LaneSums(each)
        forward = self.cost.unit_times(lane.device, 1).forward
        whole = sum(forward[slice(*self.units)])
        one = lane.seconds[lane.tasks[0]] / whole if whole else 0.0
        total = sum(bucket.summed_bytes for bucket in self.buckets) or 1
        return LaneSums(
            each,
            [one * sum(forward[self.units[0] : bucket.first]) for bucket in self.buckets],
            [bucket.summed_bytes / total for bucket in self.buckets],
        )

    def made(self, lane: Lane) -> list[float]:
        """Which part of a backward each early bucket takes, and what follows them; together 1.

        Of a split backward, which part of its weight gradients.
        """
        times = self.cost.unit_times(lane.device, 1)
        backward = times.backward
        if lane.deferred is not None:
            backward = times.weight or (0.0,) * len(backward)
        early = (bucket.first for bucket in self.buckets[: self.early])
        borders = [self.units[1], *early, self.units[0]]
        parts = [sum(backward[first:end]) for end, first in pairwise(borders)]
        whole = sum(parts)
        return [part / whole for part in parts] if whole else [1 / len(parts)] * len(parts)


@dataclass(slots=True, eq=False)
class SplitTail:
    """What a lane with a split backward does behind its last backward.

    Attributes:
        made: which part of it each early bucket takes, and what follows them.
        cuts, ways: of every bucket, the task that waits for it and how it gets there.
        first: when the first bucket is made; written by the engine only.
    """

    made: Sequence[float]
    cuts: Sequence[int]
    ways: Sequence[TransferRoute]
    first: float = 0.0
