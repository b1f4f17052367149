"""One request for a new epoch, answered by the coordinator: the shell of `coordinator_core`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

from p2ptrain import failpoints
from p2ptrain.errors import Error, LinkClosed, NotCoordinator, PlanError, UserError
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.called import called
from p2ptrain.mesh.interface import MemberChanged, MemberState, Mesh, MeshEvent
from p2ptrain.net.message import Message
from p2ptrain.plan.plan import LeftOut, Plan
from p2ptrain.plan.replanning.replicas import Replicas
from p2ptrain.training.assigning import (
    assignment_of,
    fetches_to_bytes,
    passable,
    renamed,
    stages_of,
    whole_on,
)
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.background import in_background
from p2ptrain.training.change_request import ChangeAnswer, ChangeRequest, Refusal
from p2ptrain.training.expectations import corrected, expected_of
from p2ptrain.training.household_plan import (
    Candidate,
    MeasuredHousehold,
    plan_change,
)
from p2ptrain.training.options import Recovery
from p2ptrain.training.parts import limited
from p2ptrain.training.plan_search import PlanSearch
from p2ptrain.training.protecting import Protected, protected
from p2ptrain.training.protocol import BLOB_LIMIT_BYTES, INVENTORY, PREPARE, integer
from p2ptrain.training.recovery import coordinator_events as rules
from p2ptrain.training.recovery.change import Reason
from p2ptrain.training.recovery.choose import Choice
from p2ptrain.training.recovery.committing import Seat
from p2ptrain.training.recovery.coordinator_core import CoordinatorCore
from p2ptrain.training.recovery.corrections import Expected
from p2ptrain.training.recovery.device_events import PrepareFailed
from p2ptrain.training.recovery.fetches import Fetch
from p2ptrain.training.recovery.holdings import Inventory, version_fields
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.scope import task_scope
from p2ptrain.training.surveying import Surveyor

log = get_logger(__name__)

INVENTORY_TIMEOUT_SECONDS = 30.0
"""A device that is frozen is declared dead long before, and its call ends with its link."""
PREPARE_TIMEOUT_SECONDS = 600.0
EVENTS_LIMIT = 4096
"""Far more than the answers of a household's devices to all attempts."""


_BARE = Protected((), None)


@dataclass(frozen=True)
class _Made:
    """A plan of one attempt.

    Attributes:
        left_out: devices that no planner saw.
        expected: what rounds should take; nothing where the plan stays as it is.
        seconds: what it took to make.
    """

    plan: Plan
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    expected: Mapping[Seat, Expected] = field(default_factory=dict)
    seconds: float = 0.0
    protected: Protected = _BARE


class Change:
    """Answers one request while this device coordinates in `term`."""

    def __init__(
        self, mesh: Mesh, request: ChangeRequest, term: int, surveyor: Surveyor, search: PlanSearch
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._surveyor = surveyor
        self._search = search
        self._term = term
        members = mesh.members.values()
        self._alive = frozenset(m.id for m in members if m.state is MemberState.ALIVE)
        gathers = request.recovery is Recovery.HEAVY and request.in_force is not None
        self._core = CoordinatorCore(request.ask, term, self._alive, gathers=gathers)
        self._events: asyncio.Queue[rules.CoordinatorEvent] = asyncio.Queue(EVENTS_LIMIT)
        self._stock: dict[str, Inventory] = {}
        self._silent: dict[str, str] = {}  # who gave no inventory, and why
        self._unable: dict[str, str] = {}  # who could not be made ready, and why
        self._short: dict[str, int] = {}  # memory in bytes that devices proved not to have
        self._made: dict[int, _Made] = {}  # by epoch
        self._no_plan: str | None = None  # why no plan fits, where that is so
        self._moved_bytes = 0
        self._reply: ChangeAnswer | Refusal | None = None

    async def answer(self) -> ChangeAnswer | Refusal:
        """Do everything.

        Raises:
            NotCoordinator: a device follows another one, or this one in another term.
        """
        unsubscribe = self._mesh.subscribe(self._on_mesh_event)
        try:
            async with task_scope() as group:
                tasks: list[asyncio.Task[None]] = []

                def spawn(work: Coroutine[Any, Any, None]) -> None:
                    tasks.append(group.create_task(work))

                self._carry_out(self._core.start(), spawn)
                while self._reply is None:
                    event = await self._events.get()
                    self._carry_out(self._core.handle(event), spawn)
                for task in tasks:
                    task.cancel()
        finally:
            unsubscribe()
        assert self._reply is not None
        if failpoints.armed:
            await self._reach("answer.before")
        return self._reply

    def _carry_out(
        self,
        instructions: list[rules.CoordinatorInstruction],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        prepares = [one for one in instructions if isinstance(one, rules.Prepare)]
        wanted = passable({one.device: one.fetches for one in prepares})
        for instruction in instructions:
            match instruction:
                case rules.AskInventory():
                    spawn(self._take_stock(instruction))
                case rules.Gather(device, placed, fetches):
                    spawn(self._gather(device, placed, fetches))
                case rules.MakePlan():
                    spawn(self._plan(instruction))
                case rules.Prepare(device, placed):
                    spawn(self._prepare(device, placed, wanted[device]))
                case rules.AnswerHolder(_, placed, choice):
                    self._reply = self._answered(placed, choice)
                case rules.RefuseHolder():
                    self._reply = self._refused(instruction)

    def _refused(self, refusal: rules.RefuseHolder) -> Refusal:
        holder, reason = self._request.ask.holder, refusal.reason
        why = self._unable.get(holder) or self._silent.get(holder)
        is_plan = reason == self._no_plan
        return Refusal(
            reason if why is None or is_plan else f"{reason}: {why}",
            refusal.lost,
            is_plan=is_plan,
            again=refusal.again,
            spoiled=refusal.spoiled,
            lowered=refusal.lowered,
        )

    def _on_mesh_event(self, event: MeshEvent) -> None:
        gone = (MemberState.DEAD, MemberState.LEFT)
        if isinstance(event, MemberChanged) and event.member.state in gone:
            self._events.put_nowait(rules.MemberGone(event.member.id))

    async def _reach(self, name: str) -> None:
        await failpoints.reach(name, device=self._mesh.self_id)

    def _name(self, device: str) -> str:
        return called(self._mesh, device)

    # -- stock -----------------------------------------------------------------------------------

    async def _take_stock(self, asked: rules.AskInventory) -> None:
        ask, forward = self._request.ask, asked.forward
        fields: dict[str, Any] = {
            "job": self._request.planning.job,
            "digest": self._request.planning.digest,
            "term": self._term,
            "epoch": asked.epoch,
            "holder": ask.holder,
            "alive": sorted(self._alive),
        }
        if forward is not None:
            fields["apply"] = version_fields(forward.version)
            fields["coefficient"] = forward.coefficient and list(forward.coefficient)
        try:
            reply = await self._mesh.call(
                asked.device,
                Message(INVENTORY, fields),
                timeout_seconds=INVENTORY_TIMEOUT_SECONDS,
                reply_parts=limited(BLOB_LIMIT_BYTES),
            )
            inventory = Inventory.from_bytes(reply.parts[0])
        except NotCoordinator:
            raise
        except (Error, TimeoutError) as error:
            reason = str(error) or "it did not answer in time"
            log.info("no_inventory", device=self._name(asked.device), why=reason)
            self._silent[asked.device] = reason
            failed = rules.InventoryFailed(asked.epoch, asked.device, reason)
            self._events.put_nowait(failed)
            return
        self._silent.pop(asked.device, None)
        self._stock[asked.device] = replace(inventory, device=asked.device)
        self._surveyor.learn(asked.device, inventory.speeds)
        self._events.put_nowait(rules.InventoryIn(asked.epoch, self._stock[asked.device]))

    # -- plan ------------------------------------------------------------------------------------

    async def _plan(self, make: rules.MakePlan) -> None:
        started = monotonic()
        try:
            with timed(log, "planned"):
                made = await self._make_plan(make)
        except UserError as error:
            self._refuse_plan(make.epoch, str(error))
            return
        if failpoints.armed:
            await self._reach("planned.after")
        safe = self._protect(made, make)
        self._made[make.epoch] = replace(made, seconds=monotonic() - started, protected=safe)
        self._events.put_nowait(rules.Planned(make.epoch, safe.stages))

    def _protect(self, made: _Made, make: rules.MakePlan) -> Protected:
        """Keepers for a new plan; a plan that stays keeps those it has."""
        if make.present is not None and not made.candidates:
            return Protected(make.present.stages, None)
        names = {device: candidate.name for device, candidate in made.candidates.items()}
        stages = stages_of(made.plan, {name: device for device, name in names.items()})
        links = self._surveyor.links(names)
        return protected(self._request.planning, made.plan, stages, made.candidates, links)

    def _refuse_plan(self, epoch: int, reason: str) -> None:
        if epoch == self._core.epoch:
            self._no_plan = reason
        self._events.put_nowait(rules.NotPlanned(epoch, reason))

    async def _make_plan(self, make: rules.MakePlan) -> _Made:
        request, in_force = self._request, self._request.in_force
        if make.present is not None and in_force is not None and not self._unable:
            return _Made(self._present())
        self._give_up_if_needed()
        candidates, left_out = await self._candidates(make)
        household = self._household(candidates)
        plan = await self._found(make, household)
        expected = await in_background(partial(expected_of, request.planning, household, plan))
        return _Made(plan, candidates, (*left_out, *self._left_out(make)), expected)

    def _household(self, candidates: Mapping[str, Candidate]) -> MeasuredHousehold:
        names = {device: candidate.name for device, candidate in candidates.items()}
        leaving = self._request.ask.without & names.keys()
        return MeasuredHousehold(
            list(candidates.values()),
            self._surveyor.links(names),
            self._name(self._request.ask.holder),
            frozenset(names[device] for device in leaving),
        )

    async def _found(self, make: rules.MakePlan, household: MeasuredHousehold) -> Plan:
        request = self._request
        if request.in_force is None or self._is_first(make):
            return await self._search.plan(request.planning, household)
        here = {candidate.name for candidate in household.candidates}
        proposed = self._proposed(here - household.leaving)
        if proposed is not None:
            return proposed
        places = [[self._name(device) for device in held] for held in make.choice.places]
        replicas = Replicas(tuple(tuple(n for n in held if n in here) for held in places))
        return await in_background(
            partial(
                plan_change,
                request.planning,
                household,
                self._present(),
                replicas,
                request.recovery,
            )
        )

    def _proposed(self, here: Collection[str]) -> Plan | None:
        """The plan that was found while training went on, where nothing has come between."""
        proposed = self._request.proposed
        if proposed is None or self._unable or self._short:
            return None
        size = self._request.planning.batch_size
        plan = Plan.from_json(proposed, "the plan proposed", batch_size=size)
        used = {device.name for stage in plan.stages for device in stage.devices}
        return plan if used <= set(here) else None

    def _is_first(self, make: rules.MakePlan) -> bool:
        """Whether nothing has been trained yet: then no plan has to be close to another."""
        return (
            make.choice.version.step
            == self._request.ask.past.reported
            == (self._request.planning.first_step)
        )

    def _present(self) -> Plan:
        in_force = self._request.in_force
        assert in_force is not None
        size = self._request.planning.batch_size
        plan = Plan.from_json(in_force.plan, "the plan in force", batch_size=size)
        names = {device: self._name(device) for device in in_force.assignment.devices}
        return renamed(plan, in_force.assignment, names)

    async def _candidates(
        self, make: rules.MakePlan
    ) -> tuple[dict[str, Candidate], tuple[LeftOut, ...]]:
        """Who may take part or give, with the memory it proved to have.

        Measured where it never was, unless training has only paused: then that is for later.
        """
        known: dict[str, Candidate] = {}
        reason = self._request.ask.reason
        start = reason is Reason.START
        giving = self._request.ask.without & self._stock.keys()
        devices = sorted((make.devices - self._unable.keys()) | giving)
        for device in devices:
            inventory = self._stock[device]
            if inventory.measured is not None and not start:
                known[device] = Candidate(
                    device,
                    self._name(device),
                    inventory.measured,
                    inventory.budget_bytes,
                    inventory.taken_bytes,
                )
        new = {device: self._name(device) for device in devices if device not in known}
        if reason not in (Reason.START, Reason.FAILURE):
            new = {}
        holder = self._request.ask.holder
        if start:
            with timed(log, "links_measured"):
                await self._surveyor.measure_links(devices)
        with timed(log, "profiled"):
            found = await self._surveyor.profile(self._request.planning, holder, new, len(devices))
        left_out = [answer for answer in found.values() if isinstance(answer, LeftOut)]
        for out in left_out:
            if out.name == self._name(holder):
                raise PlanError(f"the data holder's own profile failed: {out.reason}")
        known |= {d: answer for d, answer in found.items() if isinstance(answer, Candidate)}
        return {d: self._limited(d, known[d], make) for d in sorted(known)}, tuple(left_out)

    def _limited(self, device: str, candidate: Candidate, make: rules.MakePlan) -> Candidate:
        most = [candidate.memory_bytes]
        if device in self._request.ask.lowered:
            most.append(self._request.ask.lowered[device])
        if device in self._short:
            most.append(self._short[device])
        measured = corrected(candidate.measured, self._request.corrections, device)
        return replace(candidate, measured=measured, memory_bytes=min(most))

    def _left_out(self, make: rules.MakePlan) -> list[LeftOut]:
        reasons = {
            **self._silent,
            **self._unable,
            **{
                device: f"no link to {', '.join(self._name(peer) for peer in peers)}"
                for device, peers in make.left_out.items()
            },
        }
        return [LeftOut(self._name(device), reason) for device, reason in reasons.items()]

    def _give_up_if_needed(self) -> None:
        for device, reason in self._unable.items():
            planner = self._request.planning.planner
            if device == self._request.ask.holder or planner not in ("auto", "pp"):
                raise PlanError(f"{self._name(device)} could not be made ready: {reason}")

    # -- making ready ----------------------------------------------------------------------------

    async def _gather(self, device: str, placed: Placed, wanted: tuple[Fetch, ...]) -> None:
        in_force = self._request.in_force
        assert in_force is not None
        assignment = whole_on(in_force.assignment, placed)
        fields = {"needed_bytes": 0, "gather": True}
        trouble = await self._made_ready(device, assignment, fields, wanted)
        self._events.put_nowait(rules.ReadyIn(placed.epoch, device, trouble))

    async def _prepare(self, device: str, placed: Placed, wanted: tuple[Fetch, ...]) -> None:
        made, name = self._made[placed.epoch], self._name(device)
        assignment = assignment_of(self._request.planning, made.plan, placed)
        fields = {"needed_bytes": made.plan.predicted.peak_bytes.get(name, 0)}
        trouble = await self._made_ready(device, assignment, fields, wanted)
        self._events.put_nowait(rules.ReadyIn(placed.epoch, device, trouble))

    async def _made_ready(
        self,
        device: str,
        assignment: Assignment,
        fields: Mapping[str, Any],
        wanted: tuple[Fetch, ...],
    ) -> PrepareFailed | None:
        """Have `device` do it; what was in the way, if anything."""
        parts = (memoryview(assignment.to_bytes()), memoryview(fetches_to_bytes(wanted)))
        epoch = assignment.key.epoch
        if failpoints.armed:
            await self._reach("prepare.send.between")
        try:
            reply = await self._mesh.call(
                device,
                Message(PREPARE, dict(fields), parts),
                timeout_seconds=PREPARE_TIMEOUT_SECONDS,
            )
            self._moved_bytes += integer(reply.fields, "moved_bytes", 0, 2**63)
            if not reply.fields.get("ready"):
                return self._trouble(device, epoch, reply, self._made.get(epoch))
        except NotCoordinator:
            raise
        except (LinkClosed, TimeoutError) as error:
            return PrepareFailed(epoch, str(error) or "it took too long")
        except Error as error:
            if epoch == self._core.epoch:
                self._unable[device] = str(error)
            return PrepareFailed(epoch, str(error))
        return None

    def _trouble(
        self, device: str, epoch: int, reply: Message, made: _Made | None
    ) -> PrepareFailed:
        fields = reply.fields
        source, reason = fields.get("source"), str(fields.get("reason"))
        if fields.get("memory_bytes") is not None:
            memory_bytes = integer(fields, "memory_bytes")
            log.info("out_of_memory", device=self._name(device), has=memory_bytes)
            if made is not None and device in made.candidates:
                less = made.candidates[device].with_less_memory(memory_bytes)
                memory_bytes = less.memory_bytes
            self._short[device] = memory_bytes
            return PrepareFailed(epoch, reason, memory_bytes=memory_bytes)
        log.info("not_made_ready", device=self._name(device), why=reason)
        if isinstance(source, str):
            return PrepareFailed(epoch, reason, source=source)
        if epoch == self._core.epoch:
            self._unable[device] = reason
        return PrepareFailed(epoch, reason)

    def _answered(self, placed: Placed, choice: Choice) -> ChangeAnswer:
        made = self._made[placed.epoch]
        here = {device.name for stage in made.plan.stages for device in stage.devices}
        old = {out.name for out in made.plan.left_out} | here
        left_out = (*made.plan.left_out, *(out for out in made.left_out if out.name not in old))
        plan = replace(made.plan, left_out=left_out)
        request = self._request.planning
        return ChangeAnswer(
            assignment=assignment_of(request, plan, placed),
            plan=plan.to_json(),
            choice=choice,
            changes_results=tuple(request.sharing.changes(plan)),
            taken_bytes={c.name: c.taken_bytes for c in made.candidates.values()},
            planning_seconds=made.seconds,
            moved_bytes=self._moved_bytes,
            expected=made.expected,
            copy_cost=made.protected.cost,
            warnings=made.protected.warnings,
        )
