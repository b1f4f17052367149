"""A plan for the next attempt of one reconfiguration, from state reports to backup peers.

nothing speaks against the old one ──────────► the same plan
profiles and memory of the members ─┬────────► the plan found during training, if it fits
                                    └────────► a new one: close to the old; at first the best
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.coordinator.backup_cost import PlanBackups, plan_backups, snapshot_cost
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    is_profiled,
    with_times_of_holder,
)
from p2ptrain.coordinator.plan_expectations import expected_seconds, usable_now
from p2ptrain.coordinator.plan_question import Near, PlanQuestion, fit_plan
from p2ptrain.coordinator.service import search
from p2ptrain.errors import OptionError, PlanError, ProtocolError
from p2ptrain.holder.planning.planner_client import Planner
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.assign import PlanInForce, placed_stages
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.types.plan import LeftOut, Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.process.child_process import SearchPriority
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.cores.reconfigure_core import MakePlan
from p2ptrain.recovery.generation_request import GenerationRequest, ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.profile_corrections import ExpectedSeconds, ProfileCorrections
from p2ptrain.recovery.state_report import StateReport

log = get_logger(__name__)

_BARE = PlanBackups((), None)


@dataclass(frozen=True, slots=True)
class ReconfigureRequest:
    """A request: `ask.present` is always that of `in_force`.

    Attributes:
        corrections: what training has shown of the profiles.
        proposed: what was found for this change while training went on; None = to be found now.
        given: the plan to begin with, from the user; None = it is to be found.
        wants_expected: the holder was started again, and does not know what to expect of the plan
            in force, nor what its copies cost.
    """

    planning: JobPlanRequest
    ask: GenerationRequest
    in_force: PlanInForce | None
    recovery: ReplanMethod = ReplanMethod.LIGHT
    corrections: ProfileCorrections = field(default_factory=ProfileCorrections)
    proposed: Plan | None = None
    given: Plan | None = None
    wants_expected: bool = False


@dataclass(frozen=True)
class PlannedAttempt:
    """A plan of one attempt.

    Attributes:
        left_out: devices that no planner saw.
        expected: what rounds should take; of a plan that stays only where the holder does not know.
        seconds: what it took to make.
        by: id of the device that made it; empty = it is the one before, or was found while
            training went on.
    """

    plan: Plan
    candidates: Mapping[str, MeasuredDevice] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    expected: Mapping[Seat, ExpectedSeconds] = field(default_factory=dict)
    seconds: float = 0.0
    protected: PlanBackups = _BARE
    by: str = ""

    @property
    def considered(self) -> frozenset[str]:
        """Ids of the devices that the plan was chosen from; none where it is the one before."""
        known = {out.name for out in self.plan.left_out} | self.plan.device_names
        return frozenset(d for d, one in self.candidates.items() if one.name in known)


@dataclass
class DeviceFindings:
    """What a request has found out about devices, by id; filled while it is answered.

    Attributes:
        state_reports: the newest, by device.
        silent: who gave none, and why.
        unable: who could not be made ready, and why.
    """

    state_reports: dict[str, StateReport] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)


class PlanStep:
    """Plans for one request."""

    def __init__(
        self,
        mesh: Mesh,
        request: ReconfigureRequest,
        profiler: ClusterProfiler,
        planner: Planner,
        heard: DeviceFindings,
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._profiler = profiler
        self._planner = planner
        self._findings = heard
        self._trouble: tuple[str, str] | None = None  # whose plan could not be made ready, and why
        self._newest = 0  # generation of the newest attempt

    def was_not_ready(self, made: PlannedAttempt, reason: str) -> bool:
        """Whether another device's plan may be to blame: then the next one is made here."""
        if made.by in ("", self._mesh.self_id):
            return False
        self._trouble = made.by, reason
        return True

    def was_ready(self) -> None:
        """All devices are ready: where no device was to blame either, that plan was."""
        if self._trouble is not None and not self._findings.unable:
            device, reason = self._trouble
            self._planner.was_useless(device, f"made a plan that cannot be used ({reason})")

    async def plan(self, make: MakePlan) -> PlannedAttempt:
        """With backup peers for its copies.

        Raises:
            UserError: no plan fits, or there is no use in another one.
        """
        started = monotonic()
        self._newest = make.generation
        with timed(log, "planned"):
            made = await self._make_plan(make)
        await failpoints.reach("planned.after", device=self._mesh.self_id)
        safe = self._protect(made)
        return replace(made, seconds=monotonic() - started, protected=safe)

    def _protect(self, made: PlannedAttempt) -> PlanBackups:
        """Backup peers for a new plan; a plan that stays keeps those it has."""
        if not made.candidates:
            return made.protected
        names = {device: candidate.name for device, candidate in made.candidates.items()}
        kinds = {device: candidate.compute for device, candidate in made.candidates.items()}
        stages = placed_stages(made.plan, {name: device for device, name in names.items()}, kinds)
        links = self._profiler.links(names)
        planning, holder = self._request.planning, self._request.ask.holder
        return plan_backups(planning, made.plan, stages, made.candidates, links, holder)

    async def _make_plan(self, make: MakePlan) -> PlannedAttempt:
        in_force = self._request.in_force
        if self._request.given is not None:
            return await self._chosen(make, {})
        if make.present is not None and in_force is not None and not self._findings.unable:
            return await self._as_it_was(make.present, len(make.devices))
        self._give_up_if_needed()
        later = self._later(make)
        try:
            return await self._chosen(make, later)
        except PlanError as error:
            if not later:
                raise
            log.info("planned_with_newcomers", why=str(error))
        return await self._chosen(make, {})

    async def _as_it_was(self, present: Placement, count: int) -> PlannedAttempt:
        """The plan in force; for a holder that was started again, what its earlier process knew."""
        plan, stages = self._present(), present.stages
        said = await self._reports_again(present, count)
        if not said:
            return PlannedAttempt(plan, protected=PlanBackups(stages, None))
        planning, household = self._request.planning, self._household(said)
        cost = snapshot_cost(planning, plan, stages, said, household.links)
        expected = await run_in_background(partial(expected_seconds, planning, household, plan))
        return PlannedAttempt(plan, expected=expected, protected=PlanBackups(stages, cost))

    async def _reports_again(self, present: Placement, count: int) -> Mapping[str, MeasuredDevice]:
        """The plan's devices, where the holder wants to know what follows from their profiles.

        Its own, which it has written down, is of use for every later plan too.

        Args:
            count: devices that may take part.
        """
        request, holder = self._request, self._request.ask.holder
        if not request.wants_expected:
            return {}
        devices = {holder, *present.devices}
        said = {d: self._as_reported(d) for d in sorted(devices) if self._is_known(d)}
        if holder not in said:
            asked = request.planning, holder, {holder: self._name(holder)}, count
            found = (await self._profiler.profile(*asked))[holder]
            said |= {holder: found} if isinstance(found, MeasuredDevice) else {}
        if said.keys() != devices:
            return {}
        return said if request.planning.ftpipehd is None else with_times_of_holder(holder, said)

    def _later(self, make: MakePlan) -> Mapping[str, str]:
        """Names, by id, of who has come while training stands still: it is measured afterwards."""
        ask, in_force = self._request.ask, self._request.in_force
        if ask.reason is not ReconfigureReason.FAILURE or in_force is None:
            return {}
        new = (
            make.devices - self._findings.unable.keys() - {ask.holder, *in_force.assignment.devices}
        )
        return {d: self._name(d) for d in sorted(new) if not self._is_known(d)}

    async def _chosen(self, make: MakePlan, later: Mapping[str, str]) -> PlannedAttempt:
        """From all but those of `later`; the user's plan, where there is one, on these devices."""
        candidates, unmeasured = await self._candidates(make, later)
        left_out = (*unmeasured, *self._left_out(make))
        planning, household = self._request.planning, self._household(candidates)
        given, by = self._request.given, ""
        if given is not None:
            plan = await run_in_background(partial(fit_plan, given, planning, household, left_out))
        else:
            try:
                plan, by = await self._found(make, household)
            except PlanError as error:
                raise _naming(left_out, error) from error
        settled = planning.settled(asynchronous=plan.mode is PlanMode.ASYNC)
        expected = await run_in_background(partial(expected_seconds, settled, household, plan))
        return PlannedAttempt(plan, candidates, left_out, expected, by=by)

    def _household(self, candidates: Mapping[str, MeasuredDevice]) -> MeasuredCluster:
        ask = self._request.ask
        return MeasuredCluster.of(
            candidates.values(), self._profiler.links, self._name(ask.holder), ask.without
        )

    async def _found(self, make: MakePlan, household: MeasuredCluster) -> tuple[Plan, str]:
        question = self._question(make, household)
        proposed = self._proposed(make, question)
        if proposed is not None:
            return proposed, ""
        if make.generation != self._newest:  # asking would give up the newest one's question
            raise PlanError("a later attempt has begun")
        if self._trouble is not None:
            return await search(question, SearchPriority.ALONE), self._mesh.self_id
        return await self._planner.plan(question)

    def _question(self, make: MakePlan, household: MeasuredCluster) -> PlanQuestion:
        request = self._request
        is_published = request.planning.ftpipehd is not None
        from_zero = request.in_force is None or self._is_first(make)
        if from_zero or (is_published and request.recovery is ReplanMethod.LIGHT):
            return PlanQuestion(request.planning, household)
        here = {candidate.name for candidate in household.candidates}
        places = [[self._name(device) for device in held] for held in make.choice.places]
        replicas = Replicas(tuple(tuple(n for n in held if n in here) for held in places))
        near = Near(self._present(), replicas, request.recovery)
        return PlanQuestion(request.planning, household, near)

    def _proposed(self, make: MakePlan, question: PlanQuestion) -> Plan | None:
        """The plan that was found while training went on, where nothing has come between."""
        proposed, is_first = self._request.proposed, self._request.in_force is None
        if proposed is None or is_first or self._is_first(make):
            return None
        if self._findings.unable or make.lowered != self._request.ask.lowered:
            return None
        try:
            return question.proposed(proposed)
        except (OptionError, ProtocolError) as error:
            log.info("not_as_proposed", why=str(error))
            return None

    def _is_first(self, make: MakePlan) -> bool:
        """Whether nothing has been trained yet: then no plan has to be close to another."""
        return (
            make.choice.version.step
            == self._request.ask.past.reported
            == (self._request.planning.first_step)
        )

    def _present(self) -> Plan:
        assert self._request.in_force is not None
        return self._request.in_force.named(self._mesh)

    async def _candidates(
        self, make: MakePlan, later: Mapping[str, str]
    ) -> tuple[dict[str, MeasuredDevice], tuple[LeftOut, ...]]:
        """Who may take part or give, with the memory it proved to have.

        Measured where it never was, unless training has only paused: then that is for later.
        """
        known: dict[str, MeasuredDevice] = {}
        reason, holder = self._request.ask.reason, self._request.ask.holder
        start = reason is ReconfigureReason.START
        giving = self._request.ask.without & self._findings.state_reports.keys()
        devices = sorted(((make.devices - self._findings.unable.keys()) | giving) - later.keys())
        for device in devices:
            if not start and self._is_known(device):
                known[device] = self._as_reported(device)
        new = {device: self._name(device) for device in devices if device not in known}
        if reason not in (ReconfigureReason.START, ReconfigureReason.FAILURE):
            new = {d: name for d, name in new.items() if d == holder}  # no plan is without it
        if start:
            with timed(log, "links_measured"):
                await self._profiler.measure_links(devices)
        with timed(log, "profiled"):
            found = await self._profiler.profile(self._request.planning, holder, new, len(devices))
        left_out = [answer for answer in found.values() if isinstance(answer, LeftOut)]
        left_out += [LeftOut(name, "it came while training stood still") for name in later.values()]
        for out in left_out:
            if out.name == self._name(holder):
                raise PlanError(f"measuring this device failed: {out.reason}")
        known |= {d: answer for d, answer in found.items() if isinstance(answer, MeasuredDevice)}
        asked = self._request.planning, known, holder, self._request.corrections, make.lowered
        usable, useless = await run_in_background(partial(usable_now, *asked))
        return usable, (*left_out, *useless)

    def _is_known(self, device: str) -> bool:
        state_report, request = self._findings.state_reports[device], self._request
        return is_profiled(state_report, request.planning, request.ask.holder)

    def _as_reported(self, device: str) -> MeasuredDevice:
        """A device by its state report for this request."""
        return MeasuredDevice.of(device, self._name(device), self._findings.state_reports[device])

    def _left_out(self, make: MakePlan) -> list[LeftOut]:
        reasons = {
            **{m.id: m.sentence for m in self._mesh.members.values() if m.rests},
            **self._findings.silent,
            **self._findings.unable,
            **{
                device: f"no link to {', '.join(self._name(peer) for peer in peers)}"
                for device, peers in make.left_out.items()
            },
        }
        return [LeftOut(self._name(device), reason) for device, reason in reasons.items()]

    def _give_up_if_needed(self) -> None:
        for device, reason in self._findings.unable.items():
            planner = self._request.planning.planner
            if device == self._request.ask.holder or planner not in ("auto", "pp"):
                raise PlanError(f"{self._name(device)} could not be made ready: {reason}")

    def _name(self, device: str) -> str:
        return display_name(self._mesh, device)


def _naming(left_out: Sequence[LeftOut], error: PlanError) -> PlanError:
    """The same, and why devices that might have helped are not in it."""
    if not left_out:
        return error
    reasons = "; ".join(f"{out.name}: {out.reason}" for out in left_out)
    return PlanError(f"{error}. Not used: {reasons}")
