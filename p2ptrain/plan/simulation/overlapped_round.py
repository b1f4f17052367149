"""One of many rounds as the runtime runs them (`overlap.py`), timed by the plain engine.

What the plain model lacks is added around the engine, so that its loop stays as it is:

    prefetch     a fed lane misses no input of its first two micro-batches; they are not sent again
    all-reduce   a lane's last backward is cut where it has made a bucket of gradients; each cut
                 sends them to the next device of the ring, and a lane without a device collects
    update       a lane updates when it is done, and the next round begins so late that each lane
                 has updated when its first task is due
    commit       no lane makes its next update before all are done and the holder has said so;
                 without optimistic updates not even this one

        lane of a   ... F7 B6 | B7: bucket 0 made | bucket 1 made |
                                    `--> uplink a, downlink b `--> uplink a, downlink b
        collector                       . . . . bucket 0 summed . . . bucket 1 summed, updates

A ring all-reduce of g devices moves 2(g-1)/g of a bucket over every hop; the slowest hop paces all.
Where the backward is split, the weight gradients still pending behind it are cut instead, the last
units' first over all micro-batches. Where the all-reduce order turns (`allreduce.py`), units
before the turn are sent at the end, and the next round's forward waits for them unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappush
from itertools import islice

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.cost.overlap import PREFETCHED_PIECES, HolderFeed
from p2ptrain.plan.simulation.allreduce import LaneSums, SplitTail, StageRing, ring_of
from p2ptrain.plan.simulation.engine import WEIGHED, Deferred, Engine, Lane, LaneSpan, TransferRoute


def steady_engine(cost: CostModel, draft: Draft, lanes: Sequence[Lane], record: bool) -> Engine:
    """The engine that times a round among many; `lanes` are those of the plain model.

    Raises:
        ValueError: `cost` is the plain model.
    """
    if cost.overlap is None:
        raise ValueError("the plain cost model knows no overlap")
    engine = SteadyEngine(
        [*lanes],
        record=record,
        word_seconds=_word_seconds(cost, draft),
        is_ahead=cost.goes_ahead(draft.devices),
    )
    for p, units in enumerate(draft.units):
        ring = [lane for lane in lanes if lane.stage == p]
        for lane in ring:
            engine.updates[lane.number] = cost.update_seconds(
                lane.device, *units, group=draft.groups[p].devices, ahead=engine.is_ahead
            )
        if len(ring) > 1:
            engine.add_collector(ring_of(cost, draft, p, ring))
    for lane in lanes:
        _prefetch(lane)
    if not draft.is_straight:
        _feed_others(cost, draft, lanes)
    return engine


@dataclass(slots=True, eq=False)
class SteadyEngine(Engine):
    """Times one round among many. Use once.

    Attributes:
        parts: in how many a lane's last backward is cut, by its number.
        tails: of lanes with a split backward in stages of several devices, by lane number.
        updates: seconds of each lane's update, by its number; lanes without one are collectors.
        sums: what its all-reduce costs it, by the number of a lane in a stage of several devices.
        word_seconds: from when the last lane is done until the holder's word is everywhere.
        is_ahead: lanes do not wait for it.
        collectors: by stage of several devices, the lane that its gradients come together in.
        sends: (lane, task) -> what else goes out when it is done, with the task that waits for it.
    """

    word_seconds: float = 0.0
    is_ahead: bool = False
    updates: dict[int, float] = field(default_factory=dict)
    sums: dict[int, LaneSums] = field(default_factory=dict)
    collectors: dict[int, Lane] = field(default_factory=dict)
    sends: dict[tuple[int, int], list[tuple[int, TransferRoute]]] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    tails: dict[int, SplitTail] = field(default_factory=dict)

    def add_collector(self, ring: StageRing) -> None:
        """Sum the gradients of a stage's lanes as they are made."""
        number, cuts = len(self.lanes), ring.cuts
        collector = Lane(
            number=number,
            stage=ring.lanes[0].stage,
            device=-number,
            tasks=tuple(cuts[:-1]),
            seconds=[0.0] * (cuts[-1] + 1),
            missing=[len(ring.working)] * (cuts[-1] + 1),
            routes=[()] * (cuts[-1] + 1),
        )
        self.lanes = [*self.lanes, collector]
        self.collectors[collector.stage] = collector
        for place, lane in enumerate(ring.lanes):
            self.sums[lane.number] = ring.sums(lane)
            if lane.tasks:
                made, ways = ring.made(lane), ring.ways(place, number)
                if lane.deferred is None:
                    self._cut_last_backward(lane, cuts, made, ways)
                else:
                    self.tails[lane.number] = SplitTail(made, cuts, ways)

    def _cut_last_backward(
        self, lane: Lane, cuts: Sequence[int], made: Sequence[float], ways: Sequence[TransferRoute]
    ) -> None:
        """One task a bucket and one more; the first keeps its number, and so its input."""
        last, room = lane.tasks[-1], cuts[-1] + 1 - len(lane.seconds)
        parts = [last, *cuts[1 : len(made)]]
        seconds, routes = [*lane.seconds, *[0.0] * room], [*lane.routes, *[()] * room]
        whole, result = seconds[last], routes[last]
        routes[last] = ()
        for task, part in zip(parts, made, strict=True):
            seconds[task] = part * whole
        sent = list(zip(cuts, ways, strict=False))
        early = len(made) - 1
        for task, one in zip(parts, sent[:early], strict=False):
            self.sends[lane.number, task] = [one]
        whole_result = [(last, route) for route in result]
        self.sends[lane.number, parts[-1]] = [*whole_result, *sent[early:]]
        self.parts[lane.number] = len(parts)
        lane.missing.extend([0] * room)
        lane.tasks = (*lane.tasks, *parts[1:])
        lane.seconds, lane.routes = seconds, routes

    @property
    def busy_seconds(self) -> dict[int, float]:
        """Computing time of the whole round by device, sums and updates included."""
        busy: dict[int, float] = {}
        for lane in self._own_lanes():
            seconds = lane.busy_seconds + self._sums(lane).all + self.updates[lane.number]
            busy[lane.device] = busy.get(lane.device, 0.0) + seconds
        return busy

    def run(self) -> float:
        """Seconds from round to round: what any lane takes, and no less than anything is busy.

        Raises:
            InternalError: the lanes' orders deadlock; a checked plan cannot.
        """
        Engine.run(self)  # super() would look for another class: slots make a new one
        for stage, collector in self.collectors.items():
            ring = [lane for lane in self._own_lanes() if lane.stage == stage and lane.ends]
            first = min(map(self._first_made, ring))
            self.reduced[stage] = first, collector.ends[-1]
        committed = max(map(self._done, self._own_lanes()), default=0.0) + self.word_seconds
        lanes = [self._update(lane, committed) for lane in self._own_lanes()]
        self.spans = list(self._whole_spans())
        return max(*lanes, *self.busy_seconds.values(), *self._interface_seconds(), 0.0)

    def _first_made(self, lane: Lane) -> float:
        tail = self.tails.get(lane.number)
        return lane.ends[-self.parts[lane.number]] if tail is None else tail.first

    def _done(self, lane: Lane) -> float:
        """When it has all that its update takes."""
        reduced = self.reduced.get(lane.stage)
        if reduced is None:
            return lane.end
        sums = self._sums(lane)
        return max(lane.end + sums.all, reduced[1] + sums.last)

    def _sums(self, lane: Lane) -> LaneSums:
        return self.sums.get(lane.number, LaneSums())

    def _update(self, lane: Lane, committed: float) -> float:
        """Let the lane update; returns how long after this round the next one may begin for it."""
        done = self._done(lane)
        begin = done if self.is_ahead else committed
        update = self.updates[lane.number]
        end = begin + update
        self.updated[lane.number] = begin, end
        first = lane.ends[0] - lane.seconds[lane.tasks[0]] if lane.ends else 0.0
        sums = self._sums(lane)
        if not sums.offsets:
            return max(end - first, committed - done)
        there = self.collectors[lane.stage].ends
        waits = [
            end + messages + part * update - offset
            for end, messages, part, offset in zip(
                there, sums.each, sums.parts, sums.offsets, strict=True
            )
        ]
        computed = lane.end + sums.all + update
        return max(computed - first, *(wait - first for wait in waits), committed - lane.end)

    def _interface_seconds(self) -> Iterable[float]:
        """How long each uplink and each downlink is occupied."""
        seconds: dict[tuple[str, int], float] = {}
        for route in self._routes():
            if route.uplink != route.downlink:
                for interface in (("up", route.uplink), ("down", route.downlink)):
                    seconds[interface] = seconds.get(interface, 0.0) + route.seconds
        return seconds.values()

    def _routes(self) -> Iterable[TransferRoute]:
        """All that is carried in a round."""
        for lane in self.lanes:
            for task in lane.tasks:
                yield from lane.routes[task]
                if lane.feed is not None and not task & 1 and task < len(lane.feed):
                    yield lane.feed[task]
        for sent in self.sends.values():
            yield from (route for _, route in sent)
        for tail in self.tails.values():
            yield from tail.ways

    def _own_lanes(self) -> Iterable[Lane]:
        return (lane for lane in self.lanes if lane.number in self.updates)

    def _begin(self) -> None:
        for lane in reversed(self.lanes):
            self._by_device.setdefault(lane.device, []).append(lane)
            if lane.feed is not None:
                forwards = [task for task in lane.tasks if not task & 1]
                self._feeds[lane.number] = iter(forwards[PREFETCHED_PIECES:])

    def _task_done(self, now: float, lane: Lane, task: int, touched: list[int]) -> None:
        Engine._task_done(self, now, lane, task, touched)
        for wakes, route in self.sends.get((lane.number, task), ()):
            self._send(now, lane, wakes, route)

    def _send(self, now: float, lane: Lane, wakes: int, route: TransferRoute) -> None:
        if route.uplink == route.downlink:
            self.lanes[route.receiver].missing[wakes] -= 1
        else:
            self._wait((now, lane.number, route.receiver, wakes, route))

    def _start_weights(self, now: float, lanes: Sequence[Lane]) -> None:
        tail = self.tails.get(lanes[0].number) if len(lanes) == 1 else None
        if tail is None or len(lanes[0].ends) < len(lanes[0].tasks):
            Engine._start_weights(self, now, lanes)
        elif lanes[0].deferred is not None and lanes[0].deferred.pending:
            self._start_tail(now, lanes[0], lanes[0].deferred, tail)

    def _start_tail(self, now: float, lane: Lane, deferred: Deferred, tail: SplitTail) -> None:
        """All that is pending, and when each bucket of it will be made."""
        seconds = sum([deferred.seconds[m] for m in deferred.pending])
        self._busy.add(lane.device)
        end = now
        for place, part in enumerate(tail.made):
            end += part * seconds
            self._count += 1
            heappush(self._events, (end, self._count, WEIGHED, -1 - place, lane))
        tail.first = now + tail.made[0] * seconds
        if self.record:
            self.spans.append(LaneSpan(lane.number, deferred.pending[-1], now, end, "weight"))
        deferred.pending.clear()

    def _weights_done(self, now: float, lane: Lane, micro_batch: int, touched: list[int]) -> None:
        place = -1 - micro_batch  # of a tail's part
        if place >= 0:
            tail = self.tails[lane.number]
            is_last = place + 1 == len(tail.made)
            ways = slice(place, None if is_last else place + 1)
            for cut, way in zip(tail.cuts[ways], tail.ways[ways], strict=False):
                self._send(now, lane, cut, way)
            if not is_last:
                return
        Engine._weights_done(self, now, lane, micro_batch, touched)

    def _whole_spans(self) -> Iterable[LaneSpan]:
        """Last backwards in one piece again, and no sums: those are in `reduced`."""
        above = {stage: lane.tasks[0] >> 1 for stage, lane in self.collectors.items()}
        whole: dict[tuple[int, int], LaneSpan] = {}
        latest: dict[int, tuple[int, int]] = {}
        for number, span in enumerate(self.spans):
            if span.lane not in self.updates or (span.route and span.route.carries == "sum"):
                continue
            stage = self.lanes[span.lane].stage
            if span.route is None and stage in above and span.micro_batch >= above[stage]:
                key = latest[span.lane]
                whole[key] = replace(whole[key], end_seconds=span.end_seconds)
                continue
            whole[span.lane, number] = span
            if span.route is None:
                latest[span.lane] = span.lane, number
        return whole.values()


def _word_seconds(cost: CostModel, draft: Draft) -> float:
    """From the device farthest away to the holder, and back."""
    holder = cost.holder
    ways = [
        cost.link(device, holder).latency_s + cost.link(holder, device).latency_s
        for device in draft.devices
    ]
    return max(ways, default=0.0)


def _feed_others(cost: CostModel, draft: Draft, lanes: Sequence[Lane]) -> None:
    """What the holder, in a group, spends on its others' pieces comes on top of its forwards."""
    assert cost.overlap is not None
    own = [lane for lane in lanes if lane.device == cost.holder and lane.tasks]
    if not own:
        return
    counted = 0.0
    for group, units in zip(draft.groups, draft.units, strict=True):
        if cost.holder in group.devices:
            pieces = group.piece_counts(draft.split, group.devices.index(cost.holder))
            counted += sum(
                count * cost.overlap.feed_seconds(cost.holder, *units, samples)
                for samples, count in pieces.items()
            )
    last = _fed(cost, draft, -1)
    ends = (
        (_fed(cost, draft, 0), last)
        if len(draft.groups) > 1
        else (last, HolderFeed(0, last.samples))
    )
    more = cost.overlap.feeding_seconds(*ends, draft.split.micro_batches) - counted
    forwards = sum(not task & 1 for lane in own for task in lane.tasks)
    for lane in own:
        seconds = [*lane.seconds]
        for task in lane.tasks:
            seconds[task] += 0.0 if task & 1 else max(0.0, more) / forwards
        lane.seconds = seconds


def _fed(cost: CostModel, draft: Draft, p: int) -> HolderFeed:
    """Pieces and samples of stage p that are not the holder's own."""
    group, pieces, samples = draft.groups[p], 0, 0
    for place, device in enumerate(group.devices):
        if device != cost.holder:
            pieces += sum(group.piece_counts(draft.split, place).values())
            samples += group.round_samples(draft.split, place)
    return HolderFeed(pieces, samples)


def _prefetch(lane: Lane) -> None:
    if lane.feed is not None:
        for task in islice((task for task in lane.tasks if not task & 1), PREFETCHED_PIECES):
            lane.missing[task] -= 1
