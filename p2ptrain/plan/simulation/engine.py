"""Event-driven timing of one round: lanes that compute, routes that carry, devices that share both.

Knows nothing of models or plans: `lanes.py` builds the lanes and routes. A lane is one device's
work in one stage; a stage of several devices is several lanes, whose gradients are summed when the
last of them has done its last backward.

At an instant, first everything that ends there ends; then idle devices start tasks; then waiting
transfers start, oldest first (ties: by sender's lane, receiver's lane, micro-batch; the holder's
feed counts as lane -1), each where its sender's uplink and its receiver's downlink are free.

A planner times thousands of rounds, so a task is a bare number: 2m is the forward of micro-batch m,
2m+1 its backward, and what concerns a task is a list indexed by it. Where a lane's backward is
split (`schedule.ZeroBubble`), 2m+1 is the inputs' part, and the weights' part is no task but
`Deferred`: a device that would wait computes the oldest one pending, and a forward misses, as if it
were an input, the one without which too many would be pending.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from p2ptrain.errors import InternalError
from p2ptrain.plan.types.schedule import Kind

FEED = -1
"""The sender's lane number of what the holder feeds."""

Carried = Literal["input", "output", "gradient", "sum"]


@dataclass(slots=True, eq=False)  # frozen ones would take thrice as long to build
class TransferRoute:
    """What one lane (or the holder) sends to another for a micro-batch of some size.

    Attributes:
        sender, receiver: lanes.
        uplink, downlink: what it occupies, as `CostModel.interfaces` counts.
        seconds: occupation.
        latency_s: from the end of the occupation to the arrival; below 0, but no more than the
            occupation, where what is read as it comes counts at the receiver.
    """

    carries: Carried
    sender: int
    receiver: int
    uplink: int
    downlink: int
    seconds: float
    latency_s: float


@dataclass(slots=True, eq=False)
class Deferred:
    """The weight gradients of a lane whose backward is split.

    Attributes:
        seconds: by micro-batch; 0 where the lane has no part.
        awaited: forwards that wait for a micro-batch's weight gradients.
        pending: micro-batches past their backward; written by the engine only.
        ends: when each was done, in their order; written by the engine only.
    """

    seconds: Sequence[float]
    awaited: Mapping[int, Sequence[int]]
    pending: deque[int] = field(default_factory=deque)
    ends: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Lane:
    """One device's work in one stage; sequences are indexed by task.

    Attributes:
        number: its place among the engine's lanes.
        tasks: in order; only those in which it has a part.
        seconds: of every task.
        missing: inputs of every task that have not arrived; the engine counts them down.
        routes: where every task's result goes; none at the pipeline's ends.
        feed: what the holder sends, by task (forwards only); None for the holder's own lanes and
            inner stages.
        deferred: its weight gradients, where its backward is split.
        ends: when its tasks ended, in their order; written by the engine only.
    """

    number: int
    stage: int
    device: int
    tasks: tuple[int, ...]
    seconds: Sequence[float]
    missing: list[int]
    routes: Sequence[Sequence[TransferRoute]]
    feed: Sequence[TransferRoute] | None = None
    deferred: Deferred | None = None
    ends: list[float] = field(default_factory=list)

    @property
    def busy_seconds(self) -> float:
        """Of a whole round."""
        deferred = 0.0 if self.deferred is None else sum(self.deferred.seconds)
        return sum([self.seconds[task] for task in self.tasks], deferred)

    @property
    def end(self) -> float:
        """When it had done everything; 0 without a part in the round."""
        deferred = [] if self.deferred is None else self.deferred.ends[-1:]
        return max([*self.ends[-1:], *deferred], default=0.0)

    @property
    def is_ready(self) -> bool:
        """Whether its next task could start."""
        place = len(self.ends)
        return place < len(self.tasks) and not self.missing[self.tasks[place]]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Something that took time: a task of `lane`, or (with `route`) a transfer to it."""

    lane: int
    micro_batch: int
    start_seconds: float
    end_seconds: float
    kind: Kind | None = None
    route: TransferRoute | None = None


_DONE, _FREED, _ARRIVED, _LANDED, WEIGHED = range(5)
"""What ended: a task; of a transfer the occupation, the way, or both at once; weight gradients."""

_Event: TypeAlias = tuple[float, int, int, int, "Lane | TransferRoute"]
"""Time, tie-breaker, what ended, task, and whose."""

_Waiting: TypeAlias = tuple[float, int, int, int, TransferRoute]
"""Since when, sender, receiver, the receiver's task, and the way."""


@dataclass(slots=True, eq=False)
class Engine:
    """Times one round. Use once.

    Attributes:
        lanes: by lane number, earlier stages first.
        reduce_seconds: by stage, of those with several lanes.
        record: keep `spans` (slower).
        reduced: by stage, (start, end) of its all-reduce, once everything has run.
        updated: by lane, (start, end) of its update, where updates take time.
    """

    lanes: Sequence[Lane]
    reduce_seconds: Mapping[int, float] = field(default_factory=dict)
    record: bool = False
    spans: list[LaneSpan] = field(default_factory=list)
    reduced: dict[int, tuple[float, float]] = field(default_factory=dict)
    updated: dict[int, tuple[float, float]] = field(default_factory=dict)
    _events: list[_Event] = field(default_factory=list)
    _waiting: dict[int, list[_Waiting]] = field(default_factory=dict)  # by uplink
    _by_device: dict[int, list[Lane]] = field(default_factory=dict)
    _feeds: dict[int, Iterator[int]] = field(default_factory=dict)
    _busy: set[int] = field(default_factory=set)
    _busy_uplinks: set[int] = field(default_factory=set)
    _busy_downlinks: set[int] = field(default_factory=set)
    _count: int = 0
    _has_new: bool = False
    _defers: bool = False

    @property
    def busy_seconds(self) -> dict[int, float]:
        """Computing time of the whole round by device."""
        busy: dict[int, float] = {}
        for lane in self.lanes:
            busy[lane.device] = busy.get(lane.device, 0.0) + lane.busy_seconds
        return busy

    def run(self) -> float:
        """Seconds until everything is done.

        Raises:
            InternalError: the lanes' orders deadlock; a checked plan cannot.
        """
        end = self._run_lanes()
        if any(len(lane.ends) < len(lane.tasks) for lane in self.lanes):
            raise InternalError("the stages' orders of work deadlock")
        for stage, seconds in self.reduce_seconds.items():
            start = max(lane.end for lane in self.lanes if lane.stage == stage)
            self.reduced[stage] = start, start + seconds
            end = max(end, start + seconds)
        return end

    def _run_lanes(self) -> float:
        """When the last task and transfer end."""
        now = 0.0
        self._defers = any(lane.deferred is not None for lane in self.lanes)
        self._begin()
        self._start_tasks(now, self._by_device)
        freed = False
        if not self._events or self._events[0][0] > now:
            self._start_transfers(now)
        # Local names: this loop is where planners spend their time.
        events, lanes, task_done = self._events, self.lanes, self._task_done
        busy_uplinks, busy_downlinks = self._busy_uplinks, self._busy_downlinks
        while events:
            now = events[0][0]
            touched: list[int] = []
            while events and events[0][0] == now:
                _, _, code, task, item = heappop(events)
                if isinstance(item, Lane):
                    if code == _DONE:
                        task_done(now, item, task, touched)
                    else:
                        self._weights_done(now, item, task, touched)
                    continue
                if code != _ARRIVED:
                    busy_uplinks.discard(item.uplink)
                    busy_downlinks.discard(item.downlink)
                    freed = True
                if code != _FREED:
                    lane = lanes[item.receiver]
                    lane.missing[task] -= 1
                    touched.append(lane.device)
            if touched:
                self._start_tasks(now, touched)
            if events and events[0][0] == now:
                continue  # a task that takes no time ends before a transfer begins
            if self._waiting and (freed or self._has_new):
                self._start_transfers(now)
            freed = False
        return now

    def _begin(self) -> None:
        for lane in reversed(self.lanes):  # of a device's ready tasks, the later stage's first
            self._by_device.setdefault(lane.device, []).append(lane)
        for lane in self.lanes:
            if lane.feed is not None:
                self._feeds[lane.number] = iter([task for task in lane.tasks if not task & 1])
                self._feed(0.0, lane, lane.feed)
                self._feed(0.0, lane, lane.feed)

    def _feed(self, now: float, lane: Lane, feed: Sequence[TransferRoute]) -> None:
        """The holder sends the lane's next piece, if there is one."""
        task = next(self._feeds[lane.number], None)
        if task is not None:
            self._wait((now, FEED, lane.number, task, feed[task]))

    def _wait(self, transfer: _Waiting) -> None:
        insort(self._waiting.setdefault(transfer[4].uplink, []), transfer)
        self._has_new = True

    def _task_done(self, now: float, lane: Lane, task: int, touched: list[int]) -> None:
        lane.ends.append(now)
        self._busy.discard(lane.device)
        touched.append(lane.device)
        if lane.deferred is not None and task & 1:
            lane.deferred.pending.append(task >> 1)
        for route in lane.routes[task]:
            if route.uplink == route.downlink:
                self.lanes[route.receiver].missing[task] -= 1
            else:
                self._wait((now, lane.number, route.receiver, task, route))

    def _weights_done(self, now: float, lane: Lane, micro_batch: int, touched: list[int]) -> None:
        if lane.deferred is not None:
            lane.deferred.ends.append(now)
            for task in lane.deferred.awaited.get(micro_batch, ()):
                lane.missing[task] -= 1
        self._busy.discard(lane.device)
        touched.append(lane.device)

    def _start_tasks(self, now: float, devices: Iterable[int]) -> None:
        for device in devices:
            if device in self._busy:
                continue
            lanes = self._by_device[device]
            lane = lanes[0] if len(lanes) == 1 else self._first_ready(lanes)
            place = len(lane.ends)
            if place == len(lane.tasks) or lane.missing[lane.tasks[place]]:
                if self._defers:
                    self._start_weights(now, lanes)
                continue
            task = lane.tasks[place]
            end = now + lane.seconds[task]
            self._busy.add(device)
            self._count += 1
            heappush(self._events, (end, self._count, _DONE, task, lane))
            if lane.feed is not None and not task & 1:
                self._feed(now, lane, lane.feed)
            if self.record:
                kind: Kind = "backward" if task & 1 else "forward"
                self.spans.append(LaneSpan(lane.number, task >> 1, now, end, kind))

    def _start_weights(self, now: float, lanes: Sequence[Lane]) -> None:
        """What a device of these lanes does while it would wait: later stages' weights first."""
        for lane in lanes:
            if lane.deferred is not None and lane.deferred.pending:
                micro_batch = lane.deferred.pending.popleft()
                end = now + lane.deferred.seconds[micro_batch]
                self._busy.add(lane.device)
                self._count += 1
                heappush(self._events, (end, self._count, WEIGHED, micro_batch, lane))
                if self.record:
                    self.spans.append(LaneSpan(lane.number, micro_batch, now, end, "weight"))
                return

    def _first_ready(self, lanes: Sequence[Lane]) -> Lane:
        """A lane whose next task is a ready backward, else a ready one, later stages first."""
        ready = [lane for lane in lanes if lane.is_ready]
        backward = (lane for lane in ready if lane.tasks[len(lane.ends)] & 1)
        return next(backward, ready[0] if ready else lanes[0])

    def _start_transfers(self, now: float) -> None:
        self._has_new = False
        busy_uplinks, busy_downlinks = self._busy_uplinks, self._busy_downlinks
        possible = [
            transfer
            for uplink, transfers in self._waiting.items()
            if uplink not in busy_uplinks
            for transfer in transfers
            if transfer[4].downlink not in busy_downlinks
        ]
        for waiting in sorted(possible):
            route = waiting[4]
            if route.uplink in busy_uplinks or route.downlink in busy_downlinks:
                continue
            self._waiting[route.uplink].remove(waiting)
            if not self._waiting[route.uplink]:
                del self._waiting[route.uplink]
            task = waiting[3]
            free = now + route.seconds
            busy_uplinks.add(route.uplink)
            busy_downlinks.add(route.downlink)
            self._count += 2
            if route.latency_s:
                heappush(self._events, (free, self._count, _FREED, task, route))
                end = free + route.latency_s
                heappush(self._events, (end, self._count + 1, _ARRIVED, task, route))
            else:
                end = free
                heappush(self._events, (free, self._count, _LANDED, task, route))
            if self.record:
                self.spans.append(LaneSpan(route.receiver, task >> 1, now, end, route=route))
