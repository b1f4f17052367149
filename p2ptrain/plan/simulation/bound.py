"""A lower bound on a draft's round, hundreds of times cheaper than simulating it.

Every term is a chain of things that cannot overlap in the plain cost model, so no simulation is
ever faster; with enough micro-batches the largest is usually within a few per cent of it. For each
stage p, with `fill` the first micro-batch's way to it and `drain` the last one's way back:

    compute     fill + all its forwards and backwards + drain
    depth       fill + (M-1)//K_p + 1 round trips from p to the end and back + drain
    interface   all bytes a device sends, or receives, in a round
    feed        two pieces are under way at a time: (M-1)//2 + 1 feed transfers in a row

Where a stage's backward is split, its weight gradients are in no way back and in no round trip, but

    compute     fill + all its tasks and weight gradients, with nothing behind them
                fill + its tasks + the weight gradients that its last forward waits for + drain
    drain       ends with stage 0's last weight gradients
"""

from __future__ import annotations

from collections import defaultdict

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.simulation.deferred import task_seconds, weight_seconds
from p2ptrain.plan.simulation.group_bound import group_bound, group_interface_seconds
from p2ptrain.plan.simulation.overlapped_bound import steady_bound


def lower_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds that a round of `draft` takes at least."""
    if cost.overlap is not None:
        return steady_bound(cost, draft)
    if not draft.is_straight:
        return group_bound(cost, draft)
    trips = _Trips(cost, draft)
    interface = max(interface_seconds(cost, draft).values(), default=0.0)
    return max(trips.longest_chain(), interface)


class _Trips:
    """Chains of tasks and transfers along the pipeline."""

    def __init__(self, cost: CostModel, draft: Draft) -> None:
        self.cost, self.draft = cost, draft
        split = draft.split
        self.count = split.micro_batches
        self.full = self._stages(split.first_samples)
        self.last = self._stages(split.last_samples)
        self.hops = self._hops(split.first_samples)
        self.last_hops = self._hops(split.last_samples)
        self.weights = weight_seconds(cost, draft)

    def _stages(self, samples: int) -> list[tuple[float, float]]:
        return [
            task_seconds(self.cost, self.draft, p, device, samples)
            for p, device in enumerate(self.draft.devices)
        ]

    def _hops(self, samples: int) -> list[tuple[float, float]]:
        """(forward, backward) seconds over the link after each stage but the last."""
        devices, hops = self.draft.devices, []
        for p, cut in enumerate(self.draft.borders[1:-1]):
            carried = samples * self.cost.cut_bytes(cut)
            there = self.cost.link(devices[p], devices[p + 1])
            back = self.cost.link(devices[p + 1], devices[p])
            hops.append(
                (
                    carried / there.bytes_per_s + there.latency_s,
                    carried / back.bytes_per_s + back.latency_s,
                )
            )
        return hops

    def _feed_seconds(self) -> tuple[float, float]:
        """Shortest transfers of a full piece and of the last one to stage 0."""
        cost, draft = self.cost, self.draft
        if draft.devices[0] == cost.holder:
            return 0.0, 0.0
        link = cost.link(cost.holder, draft.devices[0])
        rate = cost.profile.input_bytes / link.bytes_per_s
        split = draft.split
        return (
            split.first_samples * rate + link.latency_s,
            split.last_samples * rate + link.latency_s,
        )

    def longest_chain(self) -> float:
        """The longest of the chains named in this module's docstring, interfaces excepted."""
        count, stages = self.count, len(self.full)
        feed, last_feed = self._feed_seconds()
        round_trip, last_trip = (
            _suffix_trips(self.full, self.hops),
            _suffix_trips(self.last, self.last_hops),
        )
        longest = ((count - 1) // 2) * feed + last_feed + last_trip[0]
        fill, drain = feed, self.weights[0].last
        loads: dict[int, float] = defaultdict(float)
        for p in range(stages):
            tasks = (count - 1) * sum(self.full[p]) + sum(self.last[p])
            weights = self.weights[p]
            loads[self.draft.devices[p]] += tasks + weights.all
            trips = ((count - 1) // self.draft.warmup[p]) * round_trip[p] + last_trip[p]
            longest = max(
                longest,
                fill + max(tasks + weights.forced, trips) + drain,
                fill + tasks + weights.all,
            )
            if p + 1 < stages:
                fill += self.full[p][0] + self.hops[p][0]
                drain += self.last[p][1] + self.last_hops[p][1]
        return max(longest, *loads.values())


def _suffix_trips(
    stages: list[tuple[float, float]], hops: list[tuple[float, float]]
) -> list[float]:
    """From each stage's forward through all later stages and back to its backward's end."""
    trips = [0.0] * len(stages)
    after = 0.0
    for p in reversed(range(len(stages))):
        if p < len(hops):
            after += sum(hops[p])
        after += sum(stages[p])
        trips[p] = after
    return trips


def interface_seconds(cost: CostModel, draft: Draft) -> dict[tuple[str, int], float]:
    """Occupation of every device's uplink ("up") and downlink ("down") in a round."""
    if not draft.is_straight:
        return group_interface_seconds(cost, draft)
    seconds: dict[tuple[str, int], float] = defaultdict(float)

    def carry(sender: int, receiver: int, each: int) -> None:
        if sender != receiver:
            time = draft.split.batch_size * each / cost.link(sender, receiver).bytes_per_s
            seconds["up", sender] += time
            seconds["down", receiver] += time

    devices = [group.devices[0] for group in draft.groups]
    for p, cut in enumerate(draft.borders[1:-1]):
        carry(devices[p], devices[p + 1], cost.cut_bytes(cut))
        carry(devices[p + 1], devices[p], cost.cut_bytes(cut))
    carry(cost.holder, devices[0], cost.profile.input_bytes)
    carry(cost.holder, devices[-1], cost.profile.target_bytes)
    return seconds
