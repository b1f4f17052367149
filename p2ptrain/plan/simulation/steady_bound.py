"""A lower bound on the seconds per mini-batch of steady asynchronous running.

Like `bound.py`, chains of things that cannot overlap, but of a pipeline that is always full:

    compute     what a device computes for a mini-batch, on average over the window
    interface   all bytes it sends, or receives, for one
    depth       a device has at most so many of its mini-batches under way, each from its forward
                through the quickest devices of all later stages and back
    feed        two pieces are under way to a device: half a feed transfer for each of its own
    exchange    of gradients among the replicas of a stage
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, device_loads
from p2ptrain.plan.simulation.bound import round_interfaces
from p2ptrain.plan.types.allocation import deal


def steady_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds that a mini-batch of `draft` takes at least, once the pipeline is full."""
    return max(
        max(device_loads(cost, draft).values()) / draft.split.micro_batches,
        round_interfaces(cost, draft).longest / draft.split.micro_batches,
        *_exchange_paces(cost, draft),
        *_trip_paces(cost, draft),
        *_feed_paces(cost, draft),
    )


def _parts(draft: Draft, p: int) -> Iterator[tuple[int, int, float]]:
    """(device, samples of a mini-batch it has a part in, part of all mini-batches), by place."""
    group, split = draft.groups[p], draft.split
    ranges = group.ranges(split.first_samples)
    for device, share, (first, end) in zip(group.devices, group.shares, ranges, strict=True):
        yield device, end - first, share / split.micro_batches if group.deals else 1.0


def _common_samples(draft: Draft, p: int) -> Iterator[tuple[int, int, int, float]]:
    """(sender, receiver, samples, part of all mini-batches) between stage p and the next one."""
    pair = draft.groups[p : p + 2]
    ranges = [group.ranges(draft.split.first_samples) for group in pair]
    owners = [deal(group.shares) if group.deals else None for group in pair]
    window = range(draft.split.micro_batches)
    for places in product(*(range(len(group.devices)) for group in pair)):
        (first, end), (other_first, other_end) = (ranges[k][places[k]] for k in (0, 1))
        samples = min(end, other_end) - max(first, other_first)
        met = sum(
            all(dealt is None or dealt[m] == i for dealt, i in zip(owners, places, strict=True))
            for m in window
        )
        if samples > 0 and met:
            sender, receiver = (pair[k].devices[places[k]] for k in (0, 1))
            yield sender, receiver, samples, met / len(window)


def _trip_paces(cost: CostModel, draft: Draft) -> Iterator[float]:
    """Of every device: the shortest round trip by the mini-batches that it may have under way."""
    after = 0.0
    for p in reversed(range(len(draft.groups))):
        group, units = draft.groups[p], draft.units[p]
        if p + 1 < len(draft.groups):
            after += _min_hop_seconds(cost, draft, p)
        own = [
            (sum(cost.stage_seconds(device, *units, samples)), part)
            for device, samples, part in _parts(draft, p)
        ]
        for place, (seconds, part) in enumerate(own):
            under_way = group.in_flight_versions(place, draft.warmup[p])
            yield part * (seconds + after) / under_way
        after += min(seconds for seconds, _ in own)


def _min_hop_seconds(cost: CostModel, draft: Draft, p: int) -> float:
    """There and back between stage p and the next one, by the quickest pair."""
    each = cost.cut_bytes(draft.borders[p + 1])
    trips = []
    for sender, receiver, samples, _ in _common_samples(draft, p):
        ways = cost.link(sender, receiver), cost.link(receiver, sender)
        trips.append(sum(samples * each / link.bytes_per_s + link.latency_s for link in ways))
    return min(trips)


def _feed_paces(cost: CostModel, draft: Draft) -> Iterator[float]:
    last = len(draft.groups) - 1
    for p in {0, last}:
        profile = cost.profile
        each = profile.input_bytes * (p == 0) + profile.target_bytes * (p == last)
        for device, samples, part in _parts(draft, p):
            if device != cost.holder:
                link = cost.link(cost.holder, device)
                yield part * (samples * each / link.bytes_per_s + link.latency_s) / 2


def _exchange_paces(cost: CostModel, draft: Draft) -> list[float]:
    """By stage, seconds per mini-batch that its replicas exchange gradients."""
    return [
        cost.all_reduce_seconds(group.devices, *units) / mini_batches_each(group)
        for group, units in zip(draft.groups, draft.units, strict=True)
    ]


def mini_batches_each(group: StageGroup) -> int:
    """Mini-batches whose gradients one exchange sums."""
    return len(group.devices) if group.deals else 1
