"""A simulated device: a worker's port, a compute thread, memory that holds numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, ParamSpec

from p2ptrain.plan.types.memory_budgets import NO_MEMORY, MemoryShortage
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.cores.worker_core import WorkerCore
from p2ptrain.recovery.cores.worker_port import HolderState, StateReportAsked
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import PrepareFailed
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import (
    ReplayWindow,
    StageCopy,
    StateEntry,
    StateKind,
    StateReport,
)
from p2ptrain.recovery.version import Version
from tests.simulation.recovery.changing import random_stages
from tests.simulation.recovery.truth import backward, forward, mix
from tests.simulation.recovery.world import World

PASSED_OVER_SECONDS = 600.0
SHORT = MemoryShortage(NO_MEMORY)

P = ParamSpec("P")


@dataclass(slots=True)
class Seat:
    """A stage that this device trains."""

    index: int
    first: int
    end: int
    version: Version
    states: tuple[int, ...]
    ready: Version | None = None
    gradients: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    step: int = -1  # of the round under way
    keep: bool = False
    checked: tuple[Version, tuple[int, ...]] | None = None  # found to be what it must be
    came: dict[tuple[str, int], int] = field(default_factory=dict)  # (what, step) -> number
    sums: dict[int, set[str]] = field(default_factory=dict)
    own_sum: bool = False


@dataclass(slots=True)
class SentNumbers:
    """What this device sent in a generation, from step `since` on.

    Attributes:
        numbers: by receiving stage, what it was, and step.
    """

    generation: int
    since: int
    numbers: dict[tuple[int, str, int], int] = field(default_factory=dict)

    def forget_before(self, step: int) -> None:
        """There is a newer version to go back to."""
        self.since = max(self.since, step)
        self.numbers = {key: number for key, number in self.numbers.items() if key[2] >= step}


@dataclass(slots=True)
class Task:
    """Work for the compute thread."""

    seconds: float
    action: Callable[[], None]


class Plans(Enum):
    """How a device answers when it is asked for a plan."""

    WELL = 0
    NEVER = 1
    NONSENSE = 2


class Node:
    """One device, its core's port. What a process knows goes with it; `instance` counts them."""

    core_type: type[WorkerCore] = WorkerCore
    flushes = True

    def __init__(self, id_: str, world: World) -> None:
        self.id = id_
        self.world = world
        self.runs = self.frozen = self.left = False
        self.instance = 0
        self.alive: dict[str, bool] = {}
        self.follows: tuple[str, int] | None = None
        self.wants_to_leave = False
        self.plans = Plans.WELL
        self.waited_for: list[str] = []
        self.changed = True  # since the invariants were checked last
        world.add(self)

    def start(self) -> None:
        """A new process: empty."""
        self.instance += 1
        self.runs, self.frozen, self.left = True, False, False
        self.alive, self.follows = {}, None
        self.core = self.core_type(self.id, self)
        self.seats: dict[int, Seat] = {}
        self.next_seats: dict[int, Seat] = {}
        self.copies: dict[StateEntry, tuple[int, ...]] = {}
        self.checked: list[tuple[StateEntry, tuple[int, ...]]] = []  # copies found to be right
        self.engaged: int | None = None
        self.early: list[tuple[str, dict[str, Any]]] = []
        self.orders: list[tuple[int, bool]] = []
        self.tasks: list[Task] = []
        self.computing: Task | None = None
        self.calls: dict[int, tuple[str, Callable[[dict[str, Any] | None], None]]] = {}
        self.asked_for: list[tuple[str, int, int, Version, int]] = []  # relays that wait
        self.collecting = 0
        self.log = SentNumbers(0, 0)
        self.rebuilding = 0
        self.wants_to_leave = False
        self.world.process_started(self.id)

    def kill(self) -> None:
        """SIGKILL."""
        self.runs = self.frozen = False
        self.world.process_ended(self.id, left=self.left)

    def power_off(self) -> None:
        """The machine ends too, and nobody is informed."""
        self.runs = self.frozen = False
        self.world.power_off(self.id)

    def later(self, seconds: float, label: str, action: Callable[[], None]) -> None:
        """As an event loop: not while frozen, not after the end of this process."""
        instance = self.instance

        def run() -> None:
            if self.instance == instance and self.runs:
                if self.frozen:
                    self.later(0.05, label, action)
                else:
                    action()

        self.world.after(seconds, f"{label} {self.id}", run)

    # -- what the world tells ------------------------------------------------------------------

    def on_link_up(self, peer: str) -> None:
        """A link is up."""

    def on_appeared(self, peer: str) -> None:
        """A device is alive, perhaps again."""

    def on_link_lost(self, peer: str) -> None:
        """A link broke."""
        self._fail_calls(peer)
        self.feed(self.core.link_ended, peer)

    def on_died(self, peer: str, *, certain: bool) -> None:
        """A device is dead."""
        self._fail_calls(peer)
        if peer == self.core.holder:
            self.feed(self.core.holder_is, HolderState.GONE)

    def on_left(self, peer: str) -> None:
        """A device said goodbye."""
        self.on_died(peer, certain=True)

    def on_coordinator(self) -> None:
        """Whom this device follows has changed."""

    # -- messages --------------------------------------------------------------------------

    def call(
        self, peer: str, kind: str, then: Callable[[dict[str, Any] | None], None], **fields: Any
    ) -> None:
        """Ask; `then` gets the answer, or None where the link ended."""
        number = next(self.world.calls)
        self.calls[number] = (peer, then)
        if not self.world.send(self.id, peer, kind, request=number, **fields):
            self.later(0.001, "no link", lambda: self._answered(number, None))

    def _answered(self, number: int, fields: dict[str, Any] | None) -> None:
        found = self.calls.pop(number, None)
        if found is not None:
            found[1](fields)

    def _fail_calls(self, peer: str) -> None:
        for number in [n for n, (p, _) in self.calls.items() if p == peer]:
            self._answered(number, None)

    def reply(self, peer: str, request: int, **fields: Any) -> None:
        """Answer a call."""
        self.world.send(self.id, peer, "reply", number=request, **fields)

    def receive(self, peer: str, kind: str, fields: dict[str, Any]) -> None:
        """A message arrived."""
        match kind:
            case "reply":
                number = fields.pop("number")
                self._answered(number, fields)
            case "state_report":
                self.feed(self.core.state_asked, StateReportAsked(peer=peer, **fields))
            case "prepare":
                self.feed(self.core.prepare_asked, peer=peer, **fields)
            case "plan":
                self._on_plan(peer, **fields)
            case "passed.over":
                if peer == self.core.holder:
                    self.world.distrust(self.id, fields["device"], PASSED_OVER_SECONDS)
            case "begin":
                self.feed(self.core.begin, peer, fields["generation"])
            case "order":
                stay = fields.pop("stay")
                if fields["keep"]:
                    self.feed(self.core.retain, peer, stay)
                self.feed(self._ordered, peer, stay, **fields)
            case "commit":
                self.feed(self.core.commit, peer, **fields)
            case "offer":
                self.feed(self._offered, peer, fields["copy"])
            case "keeper":
                self.feed(self.core.keeper_assigned, peer, **fields)
            case "keep":
                versions = fields["versions"]
                self.feed(self.core.retain, peer, versions)
                if peer == self.core.holder and versions:
                    self.log.forget_before(max(versions, key=lambda version: version.age).step)
            case "log":
                number = self.logged(fields["generation"], *fields["key"])
                self.reply(peer, fields["request"], sent=number)
            case "end":
                if peer == self.core.holder:
                    self.feed(self.core.holder_is, HolderState.ENDED)
            case "read":
                self._on_read(peer, **fields)
            case "value":
                self._on_value(fields)
            case "let.go":
                self.left = True
                self.kill()
            case _:
                pass  # an answer or an acknowledgement that nobody waits for any more

    def _on_plan(self, peer: str, request: int, devices: list[str]) -> None:
        """Plan for another holder: any plan will do."""
        seconds, stages = self.world.rng.uniform(0.0, 0.2), random_stages(self, devices, peer)
        match self.plans:
            case Plans.NEVER:
                return
            case Plans.NONSENSE:
                stages = self.world.rng.choice((stages[1:], (*stages, *stages), ["?"], None))
            case Plans.WELL:
                pass
        self.later(seconds, "planned", lambda: self.reply(peer, request, stages=stages))

    # -- the core --------------------------------------------------------------------------

    def feed(self, event: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell the core something."""
        self.changed = True
        event(*args, **kwargs)
        self._pass_on()

    def _ordered(
        self, peer: str, stay: tuple[Version, ...], generation: int, step: int, *, keep: bool
    ) -> None:
        if self.core.round_ordered(peer, generation, step, keep=keep):
            self.orders.append((step, keep))
            self._work()

    def _offered(self, peer: str, copy: StageCopy) -> None:
        if self.core.offered(peer, copy):
            self._collect(peer, copy)

    # -- what the core has done --------------------------------------------------------------

    def answer_state(self, request: int, peer: str, entries: tuple[StateEntry, ...]) -> None:
        """See `WorkerPort`, as of all that follow."""
        state_report = StateReport(
            self.id,
            self.core.generation,
            entries,
            self._linked(),
            logged=ReplayWindow(self.log.generation, self.log.since)
            if self.log.generation
            else None,
        )
        self.reply(peer, request, state_report=state_report)

    def answer_ready(self, request: int, peer: str, trouble: PrepareFailed | None) -> None:
        """Over the network."""
        self.world.failpoint(self)
        self.reply(peer, request, trouble=trouble)

    def refuse(self, request: int, peer: str, reason: str) -> None:
        """Over the network."""
        self.reply(peer, request, refused=reason)

    def cancel_rebuild(self) -> None:
        """Its steps notice."""
        self.rebuilding += 1

    def cancel_prepare(self) -> None:
        """With what has come for it."""
        self.next_seats.clear()
        self.early.clear()

    def copy_stages(self, version: Version) -> None:
        """In the compute thread."""
        self._task(lambda: self._copy(version))

    def offer_copy(self, peer: str, copy: StageCopy) -> None:
        """Over the network."""
        self.world.send(self.id, peer, "offer", copy=copy)

    def drop_state(self, entries: tuple[StateEntry, ...]) -> None:
        """At once."""
        for entry in entries:
            self.copies.pop(entry, None)
            if entry.kind is StateKind.LIVE:
                self.seats.pop(entry.first, None)

    def report_copy(self, holder: str, copy: StageCopy, failed: str | None) -> None:
        """Over the network."""
        self.world.send(self.id, holder, "kept", copy=copy, failed=failed)

    def report_link(self, holder: str, generation: int, peer: str, *, back: bool) -> None:
        """Over the network."""
        self.world.send(self.id, holder, "link", generation=generation, peer=peer, back=back)

    def report_orphaned(self, holder: str) -> None:
        """For the tests."""
        self.waited_for.append(holder)

    def release_job(self) -> None:
        """At once."""
        self.stop_stages()
        self.seats.clear()
        self.copies.clear()

    def phase_changed(self) -> None:
        """Nothing waits for that here."""

    def _linked(self) -> frozenset[str]:
        return frozenset(peer for peer in self.world.nodes if self.world.linked(self.id, peer))

    # -- the compute thread ------------------------------------------------------------------

    def _task(self, action: Callable[[], None]) -> None:
        """In the compute thread, while the generation is not stopped."""
        self._enqueue(Task(self.world.rng.uniform(0.002, 0.03), action))

    def _enqueue(self, task: Task) -> None:
        self.tasks.append(task)
        if self.computing is None:
            self._compute()

    def _compute(self) -> None:
        if not self.tasks:
            return
        task = self.computing = self.tasks.pop(0)

        def done() -> None:
            self.computing = None
            task.action()
            if self.computing is None:
                self._compute()

        self.later(task.seconds, "computed", done)

    def stop_stages(self) -> None:
        """What has begun in the thread runs to its end; what waits is cancelled."""
        self.tasks.clear()
        self.orders.clear()
        self.collecting += 1
        self.engaged = None
        if self.flushes:
            self._enqueue(Task(0.0, self._stopped))
        else:
            self._stopped()

    def _stopped(self) -> None:
        self.feed(self.core.stopped)

    def entries(self) -> tuple[StateEntry, ...]:
        """Of its seats, and the copies; the first weights stand for themselves."""
        live = [
            StateEntry(seat.first, seat.end, seat.version, StateKind.LIVE, seat.ready)
            for seat in self.seats.values()
        ]
        return (*live, *(one for one in self.copies if one.kind is not StateKind.INITIAL))

    # -- rounds ----------------------------------------------------------------------------

    def start_stages(self, placed: Placement) -> None:
        """What came early comes now."""
        self.seats, self.next_seats = self.next_seats, {}
        self.engaged = placed.generation
        self.log = SentNumbers(placed.generation, placed.version.step)
        self.orders.clear()
        early, self.early = self.early, []
        for kind, fields in early:
            self.receive("", kind, fields)

    def _on_value(self, fields: dict[str, Any]) -> None:
        generation, first = fields["generation"], fields["first"]
        prepared = self.core.prepared
        if self.engaged != generation:
            if prepared is not None and prepared.generation == generation:
                self.early.append(
                    ("value", fields)
                )  # it overtook the word that the generation begins
            return
        seat = self.seats[first]
        if fields["what"] == "sum":
            seat.sums.setdefault(fields["step"], set()).add(fields["device"])
        else:
            seat.came[fields["what"], fields["step"]] = fields["number"]
        self._work()

    def _work(self) -> None:
        for seat in self.seats.values():
            self._advance(seat)

    def _advance(self, seat: Seat) -> None:
        generation = self.engaged
        if generation is None:
            return
        if seat.step < 0 and self.orders and self.orders[0][0] == seat.version.step:
            step, keep = self.orders[0]
            came = mix(step) if seat.first == 0 else seat.came.pop(("forward", step), None)
            if came is not None:
                self.orders.pop(0)
                seat.step, seat.keep = step, keep
                self._task(lambda: self._forward(seat, generation, came))
        if seat.step >= 0 and seat.forwards and not seat.gradients:
            came_back = seat.came.pop(("backward", seat.step), None)
            if came_back is not None:
                seat.gradients = [0]
                self._task(lambda: self._backward(seat, generation, came_back))
        self._check_ready(seat, generation)

    def _forward(self, seat: Seat, generation: int, came: int) -> None:
        if self.engaged != generation:
            return
        seat.forwards = forward(came, seat.states)
        placed = self._placed()
        if seat.end == self.world.truth.units:
            seat.came["backward", seat.step] = mix(seat.forwards[-1], seat.step)
        else:
            stage = placed.stages[seat.index + 1]
            self.log.numbers[seat.index + 1, "forward", seat.step] = seat.forwards[-1]
            for device in stage.devices:
                self._send_value(device, stage.first, "forward", seat, seat.forwards[-1])
        self._work()

    def _backward(self, seat: Seat, generation: int, came: int) -> None:
        if self.engaged != generation:
            return
        seat.gradients = backward(came, seat.forwards, seat.states)
        placed = self._placed()
        self.log.numbers[seat.index - 1, "backward", seat.step] = seat.gradients[0]
        if seat.index and placed.stages[seat.index].devices[0] == self.id:
            stage = placed.stages[seat.index - 1]
            for device in stage.devices:
                self._send_value(device, stage.first, "backward", seat, seat.gradients[0])
        seat.own_sum = True
        for device in placed.stages[seat.index].devices:
            if device != self.id:
                self._send_value(device, seat.first, "sum", seat, 0)
        self._work()

    def _placed(self) -> Placement:
        assert self.core.running is not None
        return self.core.running

    def _send_value(self, device: str, first: int, what: str, seat: Seat, number: int) -> None:
        fields = {"what": what, "step": seat.step, "number": number, "device": self.id}
        self.world.send(self.id, device, "value", generation=self.engaged, first=first, **fields)

    def _check_ready(self, seat: Seat, generation: int) -> None:
        if not seat.own_sum or seat.ready is not None:
            return
        placed = self._placed()
        mates = set(placed.stages[seat.index].devices) - {self.id}
        if seat.sums.get(seat.step, set()) >= mates:
            seat.ready = Version(seat.step + 1, generation)
            self.changed = True
            self.world.send(
                self.id,
                placed.holder,
                "done",
                generation=generation,
                stage=seat.index,
                step=seat.step,
            )

    def apply_update(
        self, generation: int, version: Version, coefficient: Coefficient | None, *, keep: bool
    ) -> None:
        """In the compute thread."""
        for seat in self.seats.values():
            seconds = self.world.rng.uniform(0.002, 0.03)
            self._enqueue(
                Task(seconds, partial(self._update, seat, generation, version, keep=keep))
            )

    def _update(self, seat: Seat, generation: int, version: Version, *, keep: bool) -> None:
        running = self.core.running
        if running is None:
            return  # the job has ended meanwhile, and the stage with it
        salt = running.generation if len(running.stages[seat.index].devices) > 1 else 0
        seat.states = tuple(
            mix(state, gradient, salt)
            for state, gradient in zip(seat.states, seat.gradients or [0] * 99, strict=False)
        )
        self.changed = True
        self.world.failpoint(self)
        seat.version = version
        seat.ready, seat.gradients, seat.forwards = None, [], []
        seat.sums.pop(seat.step, None)
        seat.step, seat.own_sum = -1, False
        self.feed(self.core.caught_up, generation, seat.first)
        if keep:
            self._keep(seat)
        self._work()

    # -- a stage rebuilt ---------------------------------------------------------------------

    def logged(self, generation: int, stage: int, what: str, step: int) -> int | None:
        """What was sent to a stage in a step; None where that is not known any more."""
        if generation != self.log.generation or step < self.log.since:
            return None
        return self.log.numbers.get((stage, what, step))

    def rebuild_stage(self, request: int, what: Rebuild) -> None:
        """One step after the other, from what the neighbours sent."""
        self.rebuilding += 1
        making, running = self.rebuilding, self.core.running

        def end() -> None:
            self.feed(self.core.rebuilt, request)

        def came(neighbour: int, name: str, step: int, then: Callable[[int | None], None]) -> None:
            assert running is not None
            device, key = running.stages[neighbour].devices[0], (what.stage, name, step)

            def got(fields: dict[str, Any] | None) -> None:
                if making == self.rebuilding:
                    then(None if fields is None else fields.get("sent"))

            if device == self.id:
                got({"sent": self.logged(what.generation, *key)})
            else:
                self.call(device, "log", got, generation=what.generation, key=key)

        def step(number: int, states: tuple[int, ...]) -> None:
            if number == what.target.step:
                self.store(what.first, what.end, what.target, StateKind.FETCHED, states)
                end()
                return

            def there(value: int | None) -> None:
                if value is None:
                    end()
                    return
                forwards = forward(value, states)

                def back(value: int | None) -> None:
                    if value is None:
                        end()
                        return
                    gradients = backward(value, forwards, states)
                    pairs = zip(states, gradients, strict=True)
                    step(number + 1, tuple(mix(*pair, 0) for pair in pairs))

                if what.end == self.world.truth.units:
                    back(mix(forwards[-1], number))
                else:
                    came(what.stage + 1, "backward", number, back)

            if what.first == 0:
                there(mix(number))
            else:
                came(what.stage - 1, "forward", number, there)

        units = range(what.first, what.end)
        copy = [self.state(unit, what.version) for unit in units]
        known = tuple(state for state in copy if state is not None)
        if running is None or running.generation != what.generation or len(known) < len(units):
            end()
            return
        self.later(0.01, "anew", lambda: step(what.version.step, known))

    # -- copies and what others read -----------------------------------------------------------

    def _copy(self, version: Version) -> None:
        for seat in self.seats.values():
            if seat.version == version:
                self._keep(seat)

    def _keep(self, seat: Seat) -> None:
        self.store(seat.first, seat.end, seat.version, StateKind.KEPT, seat.states)
        self.feed(self.core.copied, seat.first, seat.end, seat.version)

    def store(
        self, first: int, end: int, version: Version, kind: StateKind, states: tuple[int, ...]
    ) -> None:
        """Put it into memory."""
        self.changed = True
        self.copies[StateEntry(first, end, version, kind)] = states

    def state(self, unit: int, version: Version) -> int | None:
        """The unit at that version, from whatever is here."""
        for seat in self.seats.values():
            if seat.version == version and seat.first <= unit < seat.end:
                return seat.states[unit - seat.first]
        for entry, states in self.copies.items():
            if entry.version == version and entry.has(unit):
                return states[unit - entry.first]
        return None

    def _on_read(self, peer: str, request: int, unit: int, version: Version, relayed: int) -> None:
        state = self.state(unit, version)
        if state is None and self.core.generation <= relayed:
            self.asked_for.append((peer, request, unit, version, relayed))
            return
        self.reply(peer, request, state=state)

    def _pass_on(self) -> None:
        """What others wait for may have arrived, or never will."""
        if not self.asked_for:
            return
        waiting, self.asked_for = self.asked_for, []
        for entry in waiting:
            self._on_read(*entry)

    def _read(
        self,
        peer: str,
        units: range,
        version: Version,
        then: Callable[[tuple[int, ...] | None], None],
        *,
        relayed: int = 0,
    ) -> None:
        """Unit by unit, one after the other."""
        found: list[int] = []

        def got(fields: dict[str, Any] | None) -> None:
            state = None if fields is None else fields.get("state")
            if state is None:
                then(None)
                return
            found.append(state)
            ask()

        def ask() -> None:
            if len(found) == len(units):
                then(tuple(found))
                return
            unit = units[len(found)]
            self.call(peer, "read", got, unit=unit, version=version, relayed=relayed)

        ask()

    def make_ready(self, generation: int, version: Version, fetches: tuple[Fetch, ...]) -> None:
        """All at once; to build takes a moment."""
        missing = set(fetches)

        def one(fetch: Fetch) -> None:
            def got(states: tuple[int, ...] | None) -> None:
                prepared = self.core.prepared
                if prepared is None or prepared.generation != generation or fetch not in missing:
                    return
                if states is None:
                    trouble = PrepareFailed("a source failed", fetch.peer)
                    self.feed(self.core.prepare_failed, generation, trouble)
                    return
                missing.discard(fetch)
                if fetch.peer != self.id:
                    units = (fetch.first, fetch.end)
                    self.store(*units, version, StateKind.FETCHED, states)
                    self._pass_on()
                if not missing:
                    seconds = self.world.rng.uniform(0.01, 0.2)
                    self.later(seconds, "build", partial(self._build, generation))

            relayed = generation if fetch.relayed else 0
            self._read(fetch.peer, range(fetch.first, fetch.end), version, got, relayed=relayed)

        for fetch in fetches:
            one(fetch)

    def _build(self, generation: int) -> None:
        prepared = self.core.prepared
        if prepared is None or prepared.generation != generation:
            return
        short = self.world.short_share
        if short and self.world.rng.random() < short:
            self.feed(self.core.prepare_failed, generation, PrepareFailed("no memory", short=SHORT))
            return
        seats: dict[int, Seat] = {}
        for index, stage in enumerate(prepared.stages):
            if self.id not in stage.devices:
                continue
            states = [self.state(u, prepared.version) for u in range(stage.first, stage.end)]
            if any(state is None for state in states):
                self.feed(self.core.prepare_failed, generation, PrepareFailed("it is gone"))
                return
            whole = [state for state in states if state is not None]
            seats[stage.first] = Seat(index, stage.first, stage.end, prepared.version, tuple(whole))
        self.next_seats = seats
        self.feed(self.core.built, generation)

    def _collect(self, peer: str, copy: StageCopy) -> None:
        """Read a copy from its owner; a stop ends it."""
        number = self.collecting
        if self.world.rng.random() < self.world.no_memory_share:
            self.feed(self.core.copy_failed, copy, "no memory")
            return

        def got(states: tuple[int, ...] | None) -> None:
            if states is None or number != self.collecting:
                return
            self.world.failpoint(self)
            self.store(copy.first, copy.end, copy.version, StateKind.REPLICA, states)
            self.feed(self.core.collected, copy)

        self._read(peer, range(copy.first, copy.end), copy.version, got)
