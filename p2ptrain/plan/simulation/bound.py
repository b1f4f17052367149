"""A lower bound on a draft's round, hundreds of times cheaper than simulating it.

Every term is a chain of things that cannot overlap, so no simulation is ever faster. In the plain
cost model (`group_bound.py`), for each stage p, with `fill` the first micro-batch's way to it and
`drain` the last one's way back:

    compute     fill + all its forwards and backwards + drain; or, where the backward is split, fill
                + all its tasks and weight gradients, which are in no drain but stage 0's
    depth       fill + (M-1)//K_p + 1 round trips from p to the end and back + drain
    interface   all bytes a device sends, or receives, in a round
    feed        two micro-batches are under way at a time: (M-1)//2 + 1 feed transfers in a row

With overlap (`overlapped_round.py`) the feed is ahead and all-reduces may be hidden, so neither is
in a chain:

    device      all its tasks, the messages of its all-reduce, and its update
    interface   as above
    compute     of a straight pipeline, as above, and the first stage's update
    depth       (M-1)//K_p + 1 round trips in place of the tasks
"""

from __future__ import annotations

from p2ptrain.plan.cost.allreduce_order import sent_in
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, device_loads, task_seconds, weight_seconds
from p2ptrain.plan.cost.interfaces import InterfaceLoads
from p2ptrain.plan.simulation.group_bound import group_bound


def _overlapped_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds from round to round that `draft` takes at least."""
    longest = max(_device_seconds(cost, draft).values())
    if not draft.is_straight:
        return longest
    return max(longest, _between_stages(cost, draft).longest, _longest_chain(cost, draft))


def _device_seconds(cost: CostModel, draft: Draft) -> dict[int, float]:
    assert cost.overlap is not None
    ahead, seconds = cost.goes_ahead(draft.devices), device_loads(cost, draft)
    for p, (group, units) in enumerate(zip(draft.groups, draft.units, strict=True)):
        parts = len(group.devices)
        buckets = sent_in(cost, draft, p).buckets if parts > 1 else ()
        for device in group.devices:
            seconds[device] += cost.update_seconds(device, *units, ahead=ahead)
            seconds[device] += cost.overlap.reduce_seconds(device, parts, buckets)
    return seconds


def _between_stages(cost: CostModel, draft: Draft) -> InterfaceLoads:
    """Of a straight pipeline, what its stages send one another."""
    found, devices = InterfaceLoads(cost), draft.devices
    for p, cut in enumerate(draft.borders[1:-1]):
        found.exchange(devices[p], devices[p + 1], draft.split.batch_size * cost.cut_bytes(cut))
    return found


def _longest_chain(cost: CostModel, draft: Draft) -> float:
    count, stages = draft.split.micro_batches, len(draft.groups)
    full, last = (
        _BoundTrip(cost, draft, samples)
        for samples in (draft.split.first_samples, draft.split.last_samples)
    )
    ahead = cost.goes_ahead(draft.devices)
    update = cost.update_seconds(draft.devices[0], *draft.units[0], ahead=ahead)
    weights = weight_seconds(cost, draft)
    longest = fill = 0.0
    drain = weights[0].last
    for p in range(stages):
        tasks = (count - 1) * sum(full.tasks[p]) + sum(last.tasks[p])
        trips = ((count - 1) // draft.warmup[p]) * full.trip(p) + last.trip(p)
        there_and_back = fill + max(tasks + weights[p].forced, trips) + drain
        longest = max(longest, there_and_back + update)
        if not ahead:
            longest = max(longest, fill + tasks + weights[p].all + update)
        if p + 1 < stages:
            fill += (full if count > 1 else last).tasks[p][0] + full.hops[p][0]
            drain += last.tasks[p][1] + last.hops[p][1]
    return longest


class _BoundTrip:
    """Tasks of every stage, and hops after every stage but the last, for one micro-batch."""

    def __init__(self, cost: CostModel, draft: Draft, samples: int) -> None:
        devices = draft.devices
        self.tasks = [
            task_seconds(cost, draft, p, device, samples) for p, device in enumerate(devices)
        ]
        self.hops = [
            (
                sum(_way_seconds(cost, samples, (cut, devices[p], devices[p + 1]))),
                sum(_way_seconds(cost, samples, (cut, devices[p + 1], devices[p]))),
            )
            for p, cut in enumerate(draft.borders[1:-1])
        ]

    def trip(self, p: int) -> float:
        """From stage p's forward through all later stages to its backward's end."""
        return sum(map(sum, self.tasks[p:])) + sum(map(sum, self.hops[p:]))


def _way_seconds(cost: CostModel, samples: int, way: tuple[int, int, int]) -> tuple[float, float]:
    """(occupation, latency) of (cut, sender, receiver)."""
    link = cost.link(*way[1:])
    latency = link.latency_s - samples * cost.streamed_seconds(*way)
    return samples * cost.cut_bytes(way[0]) / link.bytes_per_s, latency


def lower_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds that a round of `draft` takes at least."""
    if cost.overlap is not None:
        return _overlapped_bound(cost, draft)
    return group_bound(cost, draft)
