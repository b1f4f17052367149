"""Event-driven timing of one round: lanes that compute, routes that carry, devices that share both.

Knows nothing of models or plans: `simulate.py` builds the lanes and routes. A lane is one device's
work in one stage; a stage of several devices is several lanes, whose gradients are summed when the
last of them has done its last backward.

At an instant, first everything that ends there ends; then idle devices start tasks; then waiting
transfers start, oldest first (ties: by sender's lane, receiver's lane, micro-batch; the holder's
feed counts as lane -1), each where its sender's uplink and its receiver's downlink are free.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from p2ptrain.errors import InternalError
from p2ptrain.plan.schedule import Action, Kind

FEED = -1
"""The sender's lane number of what the holder feeds."""

Carried = Literal["input", "output", "gradient"]


@dataclass(frozen=True, slots=True)
class Route:
    """What one lane (or the holder) sends to another for a micro-batch.

    Attributes:
        sender, receiver: lanes. uplink, downlink: the devices whose interface it occupies.
        wakes: the receiver's task that waits for it.
        seconds: occupation for a full micro-batch and for the last one.
        latency_s: from the end of the occupation to the arrival.
    """

    carries: Carried
    sender: int
    receiver: int
    uplink: int
    downlink: int
    wakes: Kind
    seconds: tuple[float, float]
    latency_s: float


@dataclass(slots=True, eq=False)
class Lane:
    """One device's work in one stage.

    Attributes:
        number: its place among the engine's lanes.
        actions: in order; only those in which it has a part.
        seconds: by kind, of a full micro-batch and of the last one.
        outputs, gradients: by micro-batch, where its results go; none at the pipeline's ends.
        feed: what the holder sends it; None for the holder's own lanes and inner stages.
        missing: by kind and micro-batch, inputs that have not arrived.
        place: next action; written by the engine only, as is `forwards`, those started.
    """

    number: int
    stage: int
    device: int
    actions: tuple[Action, ...]
    seconds: dict[Kind, tuple[float, float]]
    missing: dict[Kind, list[int]]
    outputs: list[list[Route]]
    gradients: list[list[Route]]
    feed: Route | None = None
    place: int = 0
    forwards: int = 0

    @property
    def pieces(self) -> list[int]:
        """Its micro-batches in the order of their forwards."""
        return [action.micro_batch for action in self.actions if action.kind == "forward"]


@dataclass(slots=True, eq=False)
class AllReduce:
    """The sum of a stage's gradients over its lanes.

    Attributes:
        waits: lanes whose last backward is still to come; written by the engine only.
    """

    stage: int
    seconds: float
    waits: int


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: a task of `lane`, or (with `route`) a transfer to it."""

    lane: int
    micro_batch: int
    start_seconds: float
    end_seconds: float
    kind: Kind | None = None
    route: Route | None = None


_DONE, _FREED, _ARRIVED, _LANDED, _REDUCED = range(5)  # _LANDED: freed and arrived at once

_Event: TypeAlias = tuple[float, int, int, "Lane | Route | AllReduce", int]
_Waiting: TypeAlias = tuple[float, int, int, int, Route]


@dataclass(slots=True, eq=False)
class Engine:
    """Times one round. Use once.

    Attributes:
        lanes: by lane number, earlier stages first.
        micro_batches: M; number M-1 is the one that may be smaller.
        reduces: by stage, of those with several lanes.
        record: keep `spans` (slower).
        reduced: by stage, (start, end) of its all-reduce, once it has run.
        busy_seconds: computing time by device.
    """

    lanes: Sequence[Lane]
    micro_batches: int
    reduces: Mapping[int, AllReduce] = field(default_factory=dict)
    record: bool = False
    spans: list[Span] = field(default_factory=list)
    reduced: dict[int, tuple[float, float]] = field(default_factory=dict)
    busy_seconds: dict[int, float] = field(default_factory=dict)
    _events: list[_Event] = field(default_factory=list)
    _waiting: list[_Waiting] = field(default_factory=list)
    _by_device: dict[int, list[Lane]] = field(default_factory=dict)
    _idle: set[int] = field(default_factory=set)
    _touched: set[int] = field(default_factory=set)
    _busy_uplinks: set[int] = field(default_factory=set)
    _busy_downlinks: set[int] = field(default_factory=set)
    _pieces: list[Sequence[int]] = field(default_factory=list)
    _count: int = 0

    def run(self) -> float:
        """Seconds until everything is done.

        Raises:
            InternalError: the lanes' orders deadlock; a checked plan cannot.
        """
        for lane in reversed(self.lanes):  # of a device's ready tasks, the later stage's first
            self._by_device.setdefault(lane.device, []).append(lane)
        self._pieces = [lane.pieces if lane.feed is not None else () for lane in self.lanes]
        for lane in self.lanes:
            self._feed(lane, 0, 0.0)
            self._feed(lane, 1, 0.0)
        self._idle = self._touched = set(self._by_device)
        self.busy_seconds = dict.fromkeys(self._by_device, 0.0)
        now = 0.0
        self._start(now)
        events = self._events
        while events:
            now = events[0][0]
            self._touched = set()
            while events and events[0][0] == now:
                self._end(now, heappop(events))
            self._start(now)
        if any(lane.place < len(lane.actions) for lane in self.lanes):
            raise InternalError("the stages' orders of work deadlock")
        return now

    def _end(self, now: float, event: _Event) -> None:
        _, _, code, item, micro_batch = event
        if isinstance(item, Lane):
            self._task_done(now, item, micro_batch)
        elif isinstance(item, Route):
            self._transfer_moved(item, code, micro_batch)

    def _transfer_moved(self, item: Route, code: int, micro_batch: int) -> None:
        if code != _ARRIVED:
            self._busy_uplinks.discard(item.uplink)
            self._busy_downlinks.discard(item.downlink)
        if code != _FREED:
            self._arrive(item, micro_batch)

    def _task_done(self, now: float, lane: Lane, micro_batch: int) -> None:
        action = lane.actions[lane.place]
        lane.place += 1
        self._idle.add(lane.device)
        self._touched.add(lane.device)
        routes = lane.outputs if action.kind == "forward" else lane.gradients
        for route in routes[micro_batch]:
            self._send(now, route, micro_batch)
        if lane.place == len(lane.actions) and lane.stage in self.reduces:
            self._lane_done(now, self.reduces[lane.stage])

    def _lane_done(self, now: float, reduce: AllReduce) -> None:
        reduce.waits -= 1
        if not reduce.waits:
            self.reduced[reduce.stage] = now, now + reduce.seconds
            self._push(now + reduce.seconds, _REDUCED, reduce, 0)

    def _send(self, now: float, route: Route, micro_batch: int) -> None:
        if route.uplink == route.downlink:
            self._arrive(route, micro_batch)
        else:
            insort(self._waiting, (now, route.sender, route.receiver, micro_batch, route))

    def _arrive(self, route: Route, micro_batch: int) -> None:
        lane = self.lanes[route.receiver]
        lane.missing[route.wakes][micro_batch] -= 1
        self._touched.add(lane.device)

    def _feed(self, lane: Lane, piece: int, now: float) -> None:
        """Send the lane's piece number `piece`, if it is fed and has so many."""
        if lane.feed is not None:
            pieces = self._pieces[lane.number]
            if piece < len(pieces):
                self._send(now, lane.feed, pieces[piece])

    def _start(self, now: float) -> None:
        for device in self._touched & self._idle:
            lane = self._next_lane(device)
            if lane is not None:
                self._start_task(now, lane)
        if self._waiting:
            self._start_transfers(now)

    def _next_lane(self, device: int) -> Lane | None:
        """The lane whose next task is ready: a backward before a forward, later stages first."""
        ready: Lane | None = None
        for lane in self._by_device[device]:
            if lane.place == len(lane.actions):
                continue
            action = lane.actions[lane.place]
            if lane.missing[action.kind][action.micro_batch]:
                continue
            if action.kind == "backward":
                return lane
            ready = ready or lane
        return ready

    def _start_task(self, now: float, lane: Lane) -> None:
        action = lane.actions[lane.place]
        is_last = action.micro_batch == self.micro_batches - 1
        seconds = lane.seconds[action.kind][is_last]
        self._idle.discard(lane.device)
        self.busy_seconds[lane.device] += seconds
        self._push(now + seconds, _DONE, lane, action.micro_batch)
        if action.kind == "forward":
            self._feed(lane, lane.forwards + 2, now)
            lane.forwards += 1
        if self.record:
            end = now + seconds
            self.spans.append(Span(lane.number, action.micro_batch, now, end, kind=action.kind))

    def _start_transfers(self, now: float) -> None:
        kept: list[_Waiting] = []
        for transfer in self._waiting:
            route = transfer[4]
            if route.uplink in self._busy_uplinks or route.downlink in self._busy_downlinks:
                kept.append(transfer)
            else:
                self._start_transfer(now, route, transfer[3])
        self._waiting = kept

    def _start_transfer(self, now: float, route: Route, micro_batch: int) -> None:
        free = now + route.seconds[micro_batch == self.micro_batches - 1]
        self._busy_uplinks.add(route.uplink)
        self._busy_downlinks.add(route.downlink)
        if route.latency_s:
            self._push(free, _FREED, route, micro_batch)
            self._push(free + route.latency_s, _ARRIVED, route, micro_batch)
        else:
            self._push(free, _LANDED, route, micro_batch)
        if self.record:
            end = free + route.latency_s
            self.spans.append(Span(route.receiver, micro_batch, now, end, route=route))

    def _push(
        self, time: float, code: int, item: Lane | Route | AllReduce, micro_batch: int
    ) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, code, item, micro_batch))
