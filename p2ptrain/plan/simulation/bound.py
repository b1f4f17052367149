"""A lower bound on a draft's round, hundreds of times cheaper than simulating it.

Every term is a chain of things that cannot overlap, so no simulation is ever faster. A lane is one
device's part of one stage. The first piece of work reaches a lane, and the last one leads from it
back to the first stage, only over lanes with which it shares samples:

    start_l    earliest start of lane l's first forward
    tail_l     least time from the end of its last backward to the end of the round
    compute    start_l + its tasks, with the weight gradients that its last forward waits for,
               + tail_l; or start_l + all its tasks and weight gradients
    depth      start_l + the round trips that its stage's depth forces + tail_l
    interface  all bytes a device sends, or receives, in a round
    feed       two micro-batches are under way at a time: (M-1)//2 + 1 feed transfers in a row

With overlap (`overlapped_round.py`) the feed is ahead and all-reduces may be hidden, so neither is
in a chain, which the first stage's update ends; and a device has all its tasks, the messages of its
all-reduce and its update to do. Of groups only that is counted.

Of steady asynchronous running it is the seconds per mini-batch of a pipeline that is always full:

    compute    what a device computes for a mini-batch, on average over the window
    interface  all bytes it sends, or receives, for one
    depth      a device has at most so many of its mini-batches under way, each on its round trip
    feed       two pieces are under way to a device: half a feed transfer for each of its own
    exchange   of gradients among the replicas of a stage
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, device_loads, task_seconds
from p2ptrain.plan.simulation.allreduce import sent_in
from p2ptrain.plan.types.allocation import deal, max_in_window
from p2ptrain.plan.types.request import PlanMode


class InterfaceLoads:
    """How long what devices send in a round occupies each uplink and downlink.

    What is sent occupies one of either, to itself none.

    Attributes:
        up, down: seconds by `CostModel.interfaces`.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.up = [0.0] * (2 * len(cost.devices))
        self.down = [0.0] * (2 * len(cost.devices))

    @property
    def longest(self) -> float:
        """Of all of them."""
        return max(*self.up, *self.down)

    def of(self, device: int) -> float:
        """Of the longer one of a device's two."""
        own, _ = self._cost.interfaces(device, device)
        return max(self.up[own], self.down[own])

    def carry(self, sender: int, receiver: int, size: float) -> None:
        """So many bytes go one way."""
        if sender != receiver:
            seconds = size / self._cost.link(sender, receiver).bytes_per_s
            up, down = self._cost.interfaces(sender, receiver)
            self.up[up] += seconds
            self.down[down] += seconds


class DraftBounds:
    """Bounds of drafts one after the other; those that differ in their depths alone share work."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._last: tuple[Draft, _RoundBound] | None = None

    def of(self, draft: Draft) -> float:
        """Seconds that its round takes at least; asynchronously a mini-batch, once it is full."""
        shallow = replace(draft, warmup=())
        if self._last is None or self._last[0] != shallow:
            self._last = shallow, _RoundBound(self._cost, draft)
        chains = self._last[1]
        if self._cost.mode is PlanMode.ASYNC:
            return chains.steady(draft)
        if self._cost.overlap is None:
            return chains.longest(draft)
        busiest = _busiest_seconds(self._cost, draft)
        return max(busiest, chains.longest(draft)) if draft.is_straight else busiest


def lower_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds that a round of `draft` takes at least; asynchronously of a mini-batch."""
    return DraftBounds(cost).of(draft)


def round_interfaces(cost: CostModel, draft: Draft) -> InterfaceLoads:
    """All that is sent in a round but sums of gradients."""
    return _RoundBound(cost, draft).interfaces


def mini_batches_each(group: StageGroup) -> int:
    """Mini-batches whose gradients one exchange of replicas sums."""
    return len(group.devices) if group.deals else 1


def _busiest_seconds(cost: CostModel, draft: Draft) -> float:
    """Of the device that has most to do in a round among many."""
    assert cost.overlap is not None
    ahead, seconds = cost.goes_ahead(draft.devices), device_loads(cost, draft)
    for p, (group, units) in enumerate(zip(draft.groups, draft.units, strict=True)):
        parts = len(group.devices)
        buckets = sent_in(cost, draft, p).buckets if parts > 1 else ()
        for device in group.devices:
            seconds[device] += cost.update_seconds(device, *units, group=group.devices, ahead=ahead)
            seconds[device] += cost.overlap.reduce_seconds(device, parts, buckets)
    return max(seconds.values())


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


class _RoundBound:
    """The lanes of one draft, what they send, and the chains over them."""

    def __init__(self, cost: CostModel, draft: Draft) -> None:
        self.cost, self.draft, self.split = cost, draft, draft.split
        self.count = draft.split.micro_batches
        self.ahead = cost.goes_ahead(draft.devices)
        self.stages = [
            [lane for lane in self._lanes(p, group) if lane.pieces or lane.has_last]
            for p, group in enumerate(draft.groups)
        ]
        self.interfaces = InterfaceLoads(cost)
        self._fill()
        for p in range(1, len(self.stages)):
            self._join(p)

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

    def longest(self, draft: Draft) -> float:
        """The longest chain, of this draft or one with other depths."""
        self.draft = draft
        self._drain()
        self._trips()
        longest = max(
            self._lane_chain(p, lane) for p, lanes in enumerate(self.stages) for lane in lanes
        )
        if self.cost.overlap is not None:
            first, units = self.stages[0][0].device, self.draft.units[0]
            group = self.draft.groups[0].devices
            longest += self.cost.update_seconds(first, *units, group=group, ahead=self.ahead)
            return max(longest, self.interfaces.longest)
        feeds = [self._feed_chain(lane) for lane in self.stages[0]]
        return max(longest, *feeds, self.interfaces.longest, self._ends_load())

    def steady(self, draft: Draft) -> float:
        """The slowest pace, per mini-batch, of this draft or one with other depths."""
        self.draft = draft
        self._trips()
        loads = device_loads(self.cost, self.draft)
        paces = [max(*loads.values(), self.interfaces.longest) / self.count]
        for p, lanes in enumerate(self.stages):
            group, units = self.draft.groups[p], self.draft.units[p]
            exchange = self.cost.all_reduce_seconds(group.devices, *units)
            paces.append(exchange / mini_batches_each(group))
            for lane in lanes:
                part = (lane.pieces + lane.has_last) / self.count
                under_way = group.in_flight_versions(lane.place, self.draft.warmup[p])
                paces.append(part * lane.trip / under_way)
                if p in {0, len(self.stages) - 1}:
                    fed = self._feed_seconds(lane, lane.first, self._fed_bytes(p))
                    paces.append(part * fed / 2)
        return max(paces)

    def _ends_load(self) -> float:
        """All tasks of the device that has both ends."""
        if not self.draft.shared_ends:
            return 0.0
        lanes = self.stages[0][0], self.stages[-1][0]
        return sum(lane.load + lane.deferred for lane in lanes)

    def _fill(self) -> None:
        """Feed both ends, as far as the feed is not ahead."""
        for p in {0, len(self.stages) - 1}:
            each = self._fed_bytes(p)
            for lane in self.stages[p]:
                self.interfaces.carry(self.cost.holder, lane.device, lane.samples * each)
                if self.cost.overlap is None:
                    lane.start = self._feed_seconds(lane, lane.first, each)

    def _fed_bytes(self, p: int) -> int:
        """What the holder sends the devices of stage p, of a sample."""
        profile, last = self.cost.profile, len(self.stages) - 1
        return profile.input_bytes * (p == 0) + profile.target_bytes * (p == last)

    def _feed_seconds(self, lane: _BoundLane, micro_batch: int, each: int) -> float:
        if lane.device == self.cost.holder:
            return 0.0
        link = self.cost.link(self.cost.holder, lane.device)
        first, end = lane.last if micro_batch == self.count - 1 else lane.full
        return (end - first) * each / link.bytes_per_s + link.latency_s

    def _join(self, p: int) -> None:
        """What stages p-1 and p exchange, and when the first of it can arrive."""
        cut = self.draft.borders[p]
        each = self.cost.cut_bytes(cut)
        from_owners, to_owners = self.stages[p - 1][0].owners, self.stages[p][0].owners
        dealt = Counter(zip(from_owners or (), to_owners or (), strict=False))
        for after in self.stages[p]:
            for before in self.stages[p - 1]:
                full, last = _overlap(before.full, after.full), _overlap(before.last, after.last)
                pieces, has_last = self._common(before, after, dealt)
                samples = pieces * full + (last if has_last else 0)
                if not samples:
                    continue
                ends, back = (before.device, after.device), (after.device, before.device)
                self.interfaces.carry(*ends, samples * each)
                self.interfaces.carry(*back, samples * each)
                hops = self._hop_seconds(cut, *ends), self._hop_seconds(cut, *back)
                after.before.append((before, full, last if has_last else 0, *hops))
                is_last = after.first == self.count - 1
                first = last if is_last else full
                if first and self._takes(before, after.first):
                    forward = (before.last_seconds if is_last else before.full_seconds)[0]
                    latency = self.cost.link(*ends).latency_s
                    arrival = before.start + forward + first * hops[0] + latency
                    after.start = max(after.start, arrival)

    def _hop_seconds(self, cut: int, sender: int, receiver: int) -> float:
        """A sample's way before unit `cut`, but for the latency."""
        carried = self.cost.cut_bytes(cut) / self.cost.link(sender, receiver).bytes_per_s
        if self.cost.overlap is None:
            return carried
        return carried - self.cost.streamed_seconds(cut, sender, receiver)

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
                    latency = self.cost.link(lane.device, there.device).latency_s
                    latency += self.cost.link(there.device, lane.device).latency_s
                    full[lane].append(full_samples * (out + back) + latency + there.trip)
                    last[lane].append(last_samples * (out + back) + latency + there.last_trip)
            # Of a stage that deals, a piece goes to one device, whichever.
            most = min if behind and behind[0].owners is not None else max
            for lane in self.stages[p]:
                lane.trip = sum(lane.full_seconds) + most(full[lane], default=0.0)
                lane.last_trip = sum(lane.last_seconds) + min(last[lane], default=0.0)

    def _lane_chain(self, p: int, lane: _BoundLane) -> float:
        group, window = self.draft.groups[p], self.draft.warmup[p]
        load, pieces = lane.load, lane.pieces + lane.has_last
        chain = load
        if lane.owners is not None:
            window, _ = max_in_window(group.shares, lane.place, window)
        elif self.draft.splits(p):
            chain += max(pieces - self.draft.held[p], 0) * lane.weights[0]
        trips = (pieces - 1) // max(window, 1)
        chain = max(chain, trips * lane.trip + min(lane.last_trip, lane.trip)) + lane.tail
        if lane.deferred and not self.ahead:  # else it may follow the first stage's update
            reduce = self.cost.all_reduce_seconds(group.devices, *self.draft.units[p])
            chain = max(chain, load + lane.deferred + reduce)
        return lane.start + chain

    def _feed_chain(self, lane: _BoundLane) -> float:
        """Two pieces are under way at a time."""
        if lane.device == self.cost.holder:
            return 0.0
        full = self._feed_seconds(lane, 0 if self.count > 1 else lane.final, self._fed_bytes(0))
        rows = max(0, (lane.pieces + lane.has_last - 1) // 2)
        backwards = lane.last_seconds[1] if lane.has_last else lane.full_seconds[1]
        return rows * full + backwards + lane.tail


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
