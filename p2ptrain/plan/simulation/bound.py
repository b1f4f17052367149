"""A lower bound on a draft's round, hundreds of times cheaper than simulating it.

Every term is a chain of things that cannot overlap, so no simulation is ever faster. In the plain
cost model, lane by lane, for each stage p, with `fill` the first micro-batch's way to it and
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

A lane is one device's part of one stage. The first piece of work reaches a lane, and the last one
leads from it back to the first stage, only over lanes with which it shares samples:

    start_l   earliest start of lane l's first forward
    tail_l    least time from the end of its last backward to the end of the round
    compute   start_l + its tasks + tail_l
    depth     start_l + the round trips that its stage's depth forces + tail_l
    interface start_l + all that the device sends for the lane, one after the other
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.plan.cost.allreduce_order import sent_in
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, device_loads, task_seconds, weight_seconds
from p2ptrain.plan.cost.interfaces import InterfaceLoads
from p2ptrain.plan.types.allocation import deal, max_in_window


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


@dataclass(slots=True, eq=False)
class _BoundLane:
    """One device's part of one stage.

    Attributes:
        full, last: its samples of a full micro-batch and of the last one.
        pieces: micro-batches that it has a part in, except the last one.
        has_last: whether it has a part in the last one.
        first, final: its first and last micro-batch.
        owners: of a stage that deals, whose each micro-batch is.
        full_seconds, last_seconds: forward and backward of a piece; where the backward is split,
            that of the inputs.
        weights: of a piece and of the last one, the weight gradients that a split backward defers.
    """

    device: int
    place: int
    full: tuple[int, int]
    last: tuple[int, int]
    pieces: int
    has_last: bool
    first: int
    final: int
    owners: tuple[int, ...] | None
    full_seconds: tuple[float, float]
    last_seconds: tuple[float, float]
    weights: tuple[float, float] = (0.0, 0.0)
    start: float = 0.0
    tail: float = 0.0
    trip: float = 0.0
    last_trip: float = 0.0
    before: list[tuple[_BoundLane, int, int, float, float]] = field(default_factory=list)

    @property
    def load(self) -> float:
        """Seconds of all its tasks."""
        tasks = self.pieces * sum(self.full_seconds)
        return tasks + sum(self.last_seconds) if self.has_last else tasks

    @property
    def deferred(self) -> float:
        """Seconds of all its weight gradients, where its backward is split."""
        full, last = self.weights
        return self.pieces * full + self.has_last * last

    @property
    def samples(self) -> int:
        """Samples of a round."""
        total = self.pieces * (self.full[1] - self.full[0])
        return total + (self.last[1] - self.last[0] if self.has_last else 0)


def group_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds that a round of `draft` takes at least."""
    return _GroupRound(cost, draft).longest()


def round_interfaces(cost: CostModel, draft: Draft) -> InterfaceLoads:
    """All that is sent in a round but sums of gradients."""
    round_ = _GroupRound(cost, draft)
    round_.join()
    return round_.interfaces


class _GroupRound:
    """The lanes of one draft and the chains over them."""

    def __init__(self, cost: CostModel, draft: Draft) -> None:
        self.cost, self.draft, self.split = cost, draft, draft.split
        self.count = draft.split.micro_batches
        self.stages = [
            [lane for lane in self._lanes(p, group) if lane.pieces or lane.has_last]
            for p, group in enumerate(draft.groups)
        ]
        self.interfaces = InterfaceLoads(cost)

    def _lanes(self, p: int, group: StageGroup) -> list[_BoundLane]:
        split, count = self.split, self.count
        ranges = zip(
            group.ranges(split.first_samples), group.ranges(split.last_samples), strict=True
        )
        lanes = [self._lane(p, group, i, *of) for i, of in enumerate(ranges)]
        if not group.deals:
            return lanes
        owners = deal(group.shares)
        for place, lane in enumerate(lanes):
            lane.owners = owners
            lane.has_last = owners[-1] == place
            lane.pieces = group.shares[place] - lane.has_last
            lane.first = owners.index(place)
            lane.final = count - 1 - owners[::-1].index(place)
        return lanes

    def _lane(
        self, p: int, group: StageGroup, place: int, full: tuple[int, int], last: tuple[int, int]
    ) -> _BoundLane:
        device, count = group.devices[place], self.count
        samples, ragged = full[1] - full[0], last[1] - last[0]
        seconds = task_seconds(self.cost, self.draft, p, device, samples)
        return _BoundLane(
            device=device,
            place=place,
            full=full,
            last=last,
            pieces=count - 1,
            has_last=ragged > 0,
            first=0,
            final=count - 1 if ragged else count - 2,
            owners=None,
            full_seconds=seconds,
            last_seconds=(
                seconds
                if ragged == samples
                else task_seconds(self.cost, self.draft, p, device, ragged)
                if ragged
                else (0.0, 0.0)
            ),
            weights=self._weights(p, device, (samples, ragged)),
        )

    def _weights(self, p: int, device: int, pieces: tuple[int, int]) -> tuple[float, float]:
        if not self.draft.splits(p):
            return 0.0, 0.0
        full, last = (
            self.cost.split_seconds(device, *self.draft.units[p], samples)[2] if samples else 0.0
            for samples in pieces
        )
        return full, last

    def longest(self) -> float:
        """The longest chain."""
        self.join()
        self._drain()
        self._trips()
        chains = [
            self._lane_chain(p, lane) for p, lanes in enumerate(self.stages) for lane in lanes
        ]
        feeds = [self._feed_chain(lane) for lane in self.stages[0]]
        return max(*chains, *feeds, self.interfaces.longest, self._ends_load())

    def join(self) -> None:
        """Follow the first pieces from stage to stage, and count what is sent."""
        self._fill()
        for p in range(1, len(self.stages)):
            self._join(p)

    def _ends_load(self) -> float:
        """All tasks of the device that has both ends."""
        if not self.draft.shared_ends:
            return 0.0
        lanes = self.stages[0][0], self.stages[-1][0]
        return sum(lane.load + lane.deferred for lane in lanes)

    def _fill(self) -> None:
        """Feed the first stage, and count what the holder sends to both ends."""
        profile = self.cost.profile
        for lane in self.stages[0]:
            lane.start = self._feed_seconds(lane, lane.first, profile.input_bytes)
            self._feed(lane, profile.input_bytes)
        for lane in self.stages[-1]:
            if len(self.stages) > 1:
                lane.start = self._feed_seconds(lane, lane.first, profile.target_bytes)
            self._feed(lane, profile.target_bytes)

    def _feed(self, lane: _BoundLane, each: int) -> None:
        self.interfaces.carry(self.cost.holder, lane.device, lane.samples * each)

    def _feed_seconds(self, lane: _BoundLane, micro_batch: int, each: int) -> float:
        if lane.device == self.cost.holder:
            return 0.0
        link = self.cost.link(self.cost.holder, lane.device)
        first, end = lane.last if micro_batch == self.count - 1 else lane.full
        return (end - first) * each / link.bytes_per_s + link.latency_s

    def _join(self, p: int) -> None:
        """What stages p-1 and p exchange, and when the first of it can arrive."""
        each = self.cost.cut_bytes(self.draft.borders[p])
        from_owners, to_owners = self.stages[p - 1][0].owners, self.stages[p][0].owners
        dealt = Counter(zip(from_owners or (), to_owners or (), strict=False))
        for after in self.stages[p]:
            for before in self.stages[p - 1]:
                full, last = _overlap(before.full, after.full), _overlap(before.last, after.last)
                pieces, has_last = self._common(before, after, dealt)
                samples = pieces * full + (last if has_last else 0)
                if not samples:
                    continue
                self.interfaces.exchange(before.device, after.device, samples * each)
                there = self.cost.link(before.device, after.device)
                back = self.cost.link(after.device, before.device)
                hop = each / there.bytes_per_s, each / back.bytes_per_s
                after.before.append(
                    (
                        before,
                        full,
                        last if has_last else 0,
                        hop[0],
                        hop[1],
                    )
                )
                is_last = after.first == self.count - 1
                first = last if is_last else full
                if first and self._takes(before, after.first):
                    forward = (before.last_seconds if is_last else before.full_seconds)[0]
                    arrival = before.start + forward + first * hop[0] + there.latency_s
                    after.start = max(after.start, arrival)

    def _common(
        self, before: _BoundLane, after: _BoundLane, dealt: Mapping[tuple[int, int], int]
    ) -> tuple[int, bool]:
        """(micro-batches but the last, whether the last one) that both have a part in.

        `dealt` counts, where both stages deal, the micro-batches by their two owners.
        """
        has_last = before.has_last and after.has_last
        if before.owners is not None and after.owners is not None:
            return dealt.get((before.place, after.place), 0) - has_last, has_last
        return min(before.pieces, after.pieces), has_last

    def _takes(self, lane: _BoundLane, micro_batch: int) -> bool:
        if lane.owners is not None:
            return lane.owners[micro_batch] == lane.place
        return micro_batch < self.count - 1 or lane.has_last

    def _drain(self) -> None:
        """From each lane's last backward to the end of the round."""
        for p, lanes in enumerate(self.stages):
            group = self.draft.groups[p]
            reduce = self.cost.all_reduce_seconds(group.devices, *self.draft.units[p])
            for lane in lanes:
                lane.tail = lane.weights[lane.final == self.count - 1] + reduce
                for before, full, last, _, back in lane.before:
                    is_last = lane.final == self.count - 1
                    samples = last if is_last else full
                    if samples and self._takes(before, lane.final):
                        backward = (before.last_seconds if is_last else before.full_seconds)[1]
                        latency = self.cost.link(lane.device, before.device).latency_s
                        way = samples * back + latency + backward + before.tail
                        lane.tail = max(lane.tail, way)

    def _trips(self) -> None:
        """From each lane's forward of a piece to the end of its backward."""
        for p in reversed(range(len(self.stages))):
            behind = self.stages[p + 1] if p + 1 < len(self.stages) else []
            full: dict[_BoundLane, list[float]] = defaultdict(list)
            last: dict[_BoundLane, list[float]] = defaultdict(list)
            for there in behind:
                for lane, full_samples, last_samples, out, back in there.before:
                    latency = self._latencies(lane, there)
                    full[lane].append(full_samples * (out + back) + latency + there.trip)
                    last[lane].append(last_samples * (out + back) + latency + there.last_trip)
            # Of a stage that deals, a piece goes to one device, whichever.
            most = min if behind and behind[0].owners is not None else max
            for lane in self.stages[p]:
                lane.trip = sum(lane.full_seconds) + most(full[lane], default=0.0)
                lane.last_trip = sum(lane.last_seconds) + min(last[lane], default=0.0)

    def _latencies(self, one: _BoundLane, other: _BoundLane) -> float:
        """Of both directions."""
        there, back = (
            self.cost.link(one.device, other.device),
            self.cost.link(other.device, one.device),
        )
        return there.latency_s + back.latency_s

    def _lane_chain(self, p: int, lane: _BoundLane) -> float:
        depth, chain = self.draft.warmup[p], lane.load
        if depth < self.count:
            pieces = lane.pieces + lane.has_last
            window = depth
            if lane.owners is not None:
                window, _ = max_in_window(self.draft.groups[p].shares, lane.place, depth)
            trips = (pieces - 1) // max(window, 1)
            chain = max(chain, trips * lane.trip + min(lane.last_trip, lane.trip))
        if not self.draft.splits(p):
            return lane.start + chain + lane.tail
        group, units = self.draft.groups[p], self.draft.units[p]
        reduce = self.cost.all_reduce_seconds(group.devices, *units)
        return lane.start + max(chain + lane.tail, lane.load + lane.deferred + reduce)

    def _feed_chain(self, lane: _BoundLane) -> float:
        """Two pieces are under way at a time."""
        if lane.device == self.cost.holder:
            return 0.0
        each = self.cost.profile.input_bytes
        full = self._feed_seconds(lane, 0 if self.count > 1 else lane.final, each)
        rows = max(0, (lane.pieces + lane.has_last - 1) // 2)
        backwards = lane.last_seconds[1] if lane.has_last else lane.full_seconds[1]
        return rows * full + backwards + lane.tail


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
