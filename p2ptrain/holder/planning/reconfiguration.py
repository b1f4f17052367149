"""The holder's way to one new generation: the port of `reconfigure_core`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.link_survey import ASSUMED
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, planner_question
from p2ptrain.coordinator.profile_pooling import mixed_kinds
from p2ptrain.errors import Error, LinkClosed, UserError
from p2ptrain.holder.planning.plan_step import (
    DeviceFindings,
    PlannedAttempt,
    PlanStep,
    ReconfigureRequest,
)
from p2ptrain.holder.planning.planner_client import Planner
from p2ptrain.job.planning_files import write_whole
from p2ptrain.job.train_options import ReplanMethod, TrainOptions
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import GONE, MemberChanged, MemberState, Mesh, MeshEvent, display_name
from p2ptrain.mesh.waiting import wait_until_linked
from p2ptrain.messages.assign import Fetches, assignment_of, assignment_on_one, placed_stages
from p2ptrain.messages.assignment import FIRST, Assignment
from p2ptrain.messages.calls import Hangs, call_while_it_works, read_part
from p2ptrain.messages.job_requests import PrepareReply, PrepareRequest, StateRequest
from p2ptrain.messages.kinds import PREPARE, STATE_REPORT
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.net.fields import limited
from p2ptrain.net.message import Message
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.memory_budgets import NO_MEMORY
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.recovery.choose_version import KnownPast, RollForward, VersionChoice
from p2ptrain.recovery.cores.reconfigure_core import ChangeCore, MakePlan
from p2ptrain.recovery.fetch_plan import Fetch, relayable_fetches
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    PrepareFailed,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.recovery.state_report import StateReport
from p2ptrain.recovery.version import Version
from p2ptrain.tiling.planning.profile_maps import with_windows

log = get_logger(__name__)

REBUILD_SECONDS = 600.0
"""For a device to make a lost stage again."""


@dataclass(frozen=True, slots=True)
class ReconfigureReply:
    """Every device of the assignment is ready.

    Attributes:
        plan: with all devices that are left out.
        made: how it came about.
        changes_results: how results differ from one device's.
        moved_bytes: what all devices together fetched of others to be ready.
        warnings: for the user, shortcomings of the plan.
    """

    assignment: Assignment
    plan: Plan
    choice: VersionChoice
    made: PlannedAttempt
    changes_results: tuple[str, ...] = ()
    moved_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it changes that devices compute with other processors, or with accelerators."""
        names, fast_math = self.plan.device_names, self.assignment.fast_math
        devices = [one for one in self.made.candidates.values() if one.name in names]
        mixed = mixed_kinds(
            {
                c.name: str(c.measured.get("processor", ""))
                if c.compute.is_processor
                else c.compute.kind
                for c in devices
            }
        )
        fast = sorted(c.name for c in devices if fast_math and not c.compute.is_processor)
        if not fast:
            return mixed
        return (
            *mixed,
            f"fast_math: the accelerator of {', '.join(fast)} may round operands to 10 bits and "
            "add in any order: results differ by that, and from run to run",
        )


class Reconfiguration:
    """Has one generation planned, and every device of it made ready. Implements `ChangePort`."""

    def __init__(
        self,
        mesh: Mesh,
        request: ReconfigureRequest,
        profiler: ClusterProfiler,
        planner: Planner,
        hangs: Callable[[Hangs], None],
        settings: RecoverySettings,
    ) -> None:
        """`hangs`: is called for a device that does not do what it is asked for."""
        self._mesh = mesh
        self._request = request
        self._limits, self._less = settings.work_limits, settings.less_memory_share
        self._profiler = profiler
        self._hangs = hangs
        self._findings = DeviceFindings()
        self._planning = PlanStep(mesh, request, profiler, planner, self._findings)
        members = mesh.members.values()
        self._alive = frozenset(m.id for m in members if m.state is MemberState.ALIVE)
        gathers = request.recovery is ReplanMethod.HEAVY and request.in_force is not None
        self._core = ChangeCore(request.ask, self._alive, self, gathers=gathers, settings=settings)
        self._tasks = TaskOwner(lambda _, error: self._failed(error))
        self._made: dict[int, PlannedAttempt] = {}  # by generation
        self._no_plan: str | None = None  # why no plan fits, where that is so
        self._lacked: dict[str, str] = {}  # what a device's memory was short of for a plan
        self._moved_bytes = 0
        loop = asyncio.get_running_loop()
        self._reply: asyncio.Future[ReconfigureReply | ReconfigureFailure] = loop.create_future()

    async def answer(self) -> ReconfigureReply | ReconfigureFailure:
        """Do everything."""
        unsubscribe = self._mesh.subscribe(self._on_mesh_event)
        try:
            self._core.start()
            reply = await self._reply
        finally:
            self._reply.cancel()
            unsubscribe()
            await self._tasks.cancel()
        await self._reach("answer.before")
        return reply

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._reply.done():  # what ends may still say how it went
            work.close()
        else:
            self._tasks.spawn(work, "a step to a new generation")

    def _failed(self, error: BaseException) -> None:
        if not self._reply.done():
            self._reply.set_exception(error)

    def generation_ready(self, placed: Placement, choice: VersionChoice) -> None:
        """See `ChangePort`, as of all that follow."""
        self._planning.was_ready()
        made, planning = self._made[placed.generation], self._request.planning
        reply = plan_reply(planning, made, placed, choice)
        warnings = *reply.warnings, *self._lacked.values()
        self._answer(replace(reply, moved_bytes=self._moved_bytes, warnings=warnings))

    def refused(self, failure: ReconfigureFailure) -> None:
        """With what the device with the data has against it."""
        holder, reason = self._request.ask.holder, failure.reason
        why = self._findings.unable.get(holder) or self._findings.silent.get(holder)
        is_plan = reason == self._no_plan
        if why is not None and not is_plan:
            reason = f"{reason}: {why}"
        self._answer(replace(failure, reason=reason, is_plan=is_plan))

    def _answer(self, reply: ReconfigureReply | ReconfigureFailure) -> None:
        if not self._reply.done():  # cancelled, where a newer request has taken its place
            self._reply.set_result(reply)

    def _is_hanging(self, error: Hangs) -> None:
        """A device that hangs is not asked again: it is as if it had died."""
        self._hangs(error)
        self._core.gone(error.device)

    def _on_mesh_event(self, event: MeshEvent) -> None:
        if not isinstance(event, MemberChanged) or event.member.state not in GONE:
            return
        try:
            self._core.gone(event.member.id)
        except Exception as error:  # ends the job, and not what the mesh does
            self._failed(error)

    async def _reach(self, name: str) -> None:
        await failpoints.reach(name, device=self._mesh.self_id)

    def _name(self, device: str) -> str:
        return display_name(self._mesh, device)

    # -- state reports ---------------------------------------------------------------------------

    def ask_state(
        self,
        device: str,
        generation: int,
        forward: RollForward | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        """As long as it works on it."""
        self._spawn(self._ask_state(device, generation, forward, rebuild))

    async def _ask_state(
        self, device: str, generation: int, forward: RollForward | None, rebuild: Rebuild | None
    ) -> None:
        request = StateRequest(
            self._request.planning.job,
            self._request.planning.digest,
            generation,
            frozenset(self._alive),
            apply=None if forward is None else forward.version,
            coefficient=None if forward is None else forward.coefficient,
            rebuild=rebuild,
        )
        try:
            reply = await call_while_it_works(
                self._mesh,
                device,
                Message(STATE_REPORT, request.fields()),
                timeout_seconds=REBUILD_SECONDS,
                reply_parts=limited(StateReport.LIMIT.most_bytes),
                limits=self._limits,
            )
            state_report = await read_part(StateReport, reply)
        except (Error, TimeoutError) as error:
            reason = str(error) or "it did not answer in time"
            if isinstance(error, LinkClosed):
                reason = f"no link to {self._name(self._mesh.self_id)}"
            log.info("no_state_report", device=self._name(device), why=reason)
            self._findings.silent[device] = reason
            if isinstance(error, Hangs):
                self._is_hanging(error)
            self._core.no_report(generation, device)
            return
        self._findings.silent.pop(device, None)
        self._findings.state_reports[device] = replace(state_report, device=device)
        self._profiler.learn(device, state_report.speeds)
        self._core.state_reported(generation, self._findings.state_reports[device])

    # -- plan ------------------------------------------------------------------------------------

    def make_plan(self, make: MakePlan) -> None:
        """By the coordinator, or here."""
        self._spawn(self._plan(make))

    async def _plan(self, make: MakePlan) -> None:
        try:
            made = await self._planning.plan(make)
        except UserError as error:
            if make.generation == self._core.generation:
                self._no_plan = str(error)
            self._core.no_plan(make.generation, str(error))
            return
        self._made[make.generation] = made
        self._core.planned(make.generation, made.protected.stages)

    # -- making ready ----------------------------------------------------------------------------

    def prepare(
        self, placed: Placement, wanted: Mapping[str, tuple[Fetch, ...]], *, gathers: bool
    ) -> None:
        """All at once."""
        if gathers:
            assert self._request.in_force is not None
            assignment = assignment_on_one(self._request.in_force.assignment, placed)
        else:
            plan = self._made[placed.generation].plan
            assignment = assignment_of(self._request.planning, plan, placed)
        for device, fetches in relayable_fetches(wanted).items():
            needed = NO_MEMORY if gathers else plan.predicted.needed(self._name(device))
            request = PrepareRequest(needed, gather=gathers)
            self._spawn(self._prepare(device, assignment, request, fetches))

    async def _prepare(
        self,
        device: str,
        assignment: Assignment,
        request: PrepareRequest,
        fetches: tuple[Fetch, ...],
    ) -> None:
        trouble = await self._made_ready(device, assignment, request, fetches)
        self._core.ready(assignment.key.generation, device, trouble)

    async def _made_ready(
        self,
        device: str,
        assignment: Assignment,
        request: PrepareRequest,
        wanted: tuple[Fetch, ...],
    ) -> PrepareFailed | None:
        """Have `device` do it; what was in the way, if anything."""
        parts = (assignment.to_part(), Fetches(wanted).to_part())
        generation = assignment.key.generation
        await self._reach("prepare.send.between")
        try:
            asked = Message(PREPARE, request.fields(), parts)
            answer = await call_while_it_works(self._mesh, device, asked, limits=self._limits)
            reply = PrepareReply.read(answer.fields)
            self._moved_bytes += reply.moved_bytes
            if not reply.ready:
                return self._trouble(device, generation, reply, self._made.get(generation))
        except LinkClosed as error:  # it may be a moment until there is another
            await wait_until_linked(self._mesh, (device,))
            return PrepareFailed(str(error), is_link=True)
        except Hangs as error:
            self._findings.silent[device] = str(error)
            self._is_hanging(error)
            return PrepareFailed(str(error))
        except Error as error:
            if generation == self._core.generation:
                self._findings.unable[device] = str(error)
            return PrepareFailed(str(error))
        return None

    def _trouble(
        self, device: str, generation: int, reply: PrepareReply, made: PlannedAttempt | None
    ) -> PrepareFailed:
        reason, short = reply.reason or "?", reply.short
        if short is not None:
            log.info("out_of_memory", device=self._name(device), why=reason)
            self._lacked[device] = f"planned again with less: {reason}"
            if made is not None and device in made.candidates:
                less = made.candidates[device].with_less_memory(short, self._less)
                short = replace(short, has=less.memory)
            return PrepareFailed(reason, short=short)
        log.info("not_made_ready", device=self._name(device), why=reason)
        if reply.source is not None:
            return PrepareFailed(reason, source=reply.source)
        if generation == self._core.generation and not self._is_of_plan(made, reason):
            self._findings.unable[device] = reason
        return PrepareFailed(reason)

    def _is_of_plan(self, made: PlannedAttempt | None, reason: str) -> bool:
        """Whether the plan is to blame, which another device has made: then no device is left
        out."""
        return made is not None and self._planning.was_not_ready(made, reason)


def plan_reply(
    planning: JobPlanRequest, made: PlannedAttempt, placed: Placement, choice: VersionChoice
) -> ReconfigureReply:
    """What the holder says of a plan, placed so."""
    old = {out.name for out in made.plan.left_out} | made.plan.device_names
    left_out = (*made.plan.left_out, *(out for out in made.left_out if out.name not in old))
    plan = replace(made.plan, left_out=left_out)
    request = planning.settled(asynchronous=plan.mode is PlanMode.ASYNC)
    changes = tuple(request.sharing.changes(plan))
    assignment, warnings = assignment_of(request, plan, placed), made.protected.warnings
    return ReconfigureReply(assignment, plan, choice, made, changes, warnings=warnings)


_GENERATION = 1


async def plan_only(
    mesh: Mesh,
    planning: JobPlanRequest,
    profiler: ClusterProfiler,
    given: Plan | None,
    options: TrainOptions,
    units: int,
) -> ReconfigureReply:
    """Measure the members and plan as the job would; write what the options ask for.

    Raises:
        UserError: no plan fits, or `given` does not.
    """
    alive = frozenset(m.id for m in mesh.members.values() if m.state is MemberState.ALIVE)
    version = Version(planning.first_step, 0)
    past = KnownPast(FIRST, planning.first_step)
    reason, me = ReconfigureReason.START, mesh.self_id
    ask = GenerationRequest(_GENERATION, reason, units, me, alive, past)
    request = ReconfigureRequest(planning, ask, None, options.recovery, given=given)
    step = PlanStep(mesh, request, profiler, Planner(mesh, lambda *_: None), DeviceFindings())
    choice = VersionChoice(version, (), 0, "nothing is trained")
    made = await step.plan(MakePlan(_GENERATION, choice, alive, {}, {}))
    ids = {candidate.name: device for device, candidate in made.candidates.items()}
    kinds = {device: candidate.compute for device, candidate in made.candidates.items()}
    placed = Placement(_GENERATION, me, version, FIRST, placed_stages(made.plan, ids, kinds))
    reply = plan_reply(planning, made, placed, choice)
    await run_in_background(partial(_write, planning, made, reply, profiler, mesh.name, options))
    return reply


def _write(
    planning: JobPlanRequest,
    made: PlannedAttempt,
    reply: ReconfigureReply,
    profiler: ClusterProfiler,
    holder: str,
    options: TrainOptions,
) -> None:
    profile, cluster = _measured(planning, made, profiler, holder)
    for path, content in (
        (options.write_profile, profile.to_json()),
        (options.write_cluster, cluster.to_json()),
        (options.write_plan, reply.plan.to_json()),
    ):
        if path is not None:
            write_whole(path, json.dumps(content, indent=1, ensure_ascii=False))


def _measured(
    planning: JobPlanRequest, made: PlannedAttempt, profiler: ClusterProfiler, holder: str
) -> tuple[Profile, Cluster]:
    household = MeasuredCluster.of(made.candidates.values(), profiler.links, holder, frozenset())
    profile, cluster = planner_question(planning, household)
    devices = tuple(sorted(cluster.devices, key=lambda one: one.name))
    cluster = replace(cluster, devices=devices, default_link=ASSUMED)
    return profile if planning.maps is None else with_windows(profile, planning.maps), cluster
