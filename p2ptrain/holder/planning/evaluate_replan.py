"""Whether another plan would be better now, while a job trains.

    facts of every device (training continues) ──► newcomers: links, profile ──► search ──► decision

Devices that train are never profiled again: their profiles are corrected by the times of their
rounds, which the holder knows. A link in use is measured by its traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from p2ptrain import failpoints
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.coordinator import replan_decision
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    is_profiled,
)
from p2ptrain.coordinator.plan_cluster import replan_cluster
from p2ptrain.coordinator.plan_expectations import usable_now
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.errors import Error, PeerError, PlanError
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import MemberState, Mesh, display_name
from p2ptrain.messages.assign import PlanInForce
from p2ptrain.messages.calls import read_part
from p2ptrain.messages.job_requests import FactsRequest
from p2ptrain.messages.kinds import FACTS
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.net.fields import LARGE, limited
from p2ptrain.net.message import Message
from p2ptrain.plan.replan.hysteresis import REPAY_SECONDS, ReplanAction, ReplanDecision
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import LeftOut, Plan
from p2ptrain.process.child_process import ChildProcess, SearchPriority, run_in_child
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.profile_corrections import ProfileCorrections
from p2ptrain.recovery.state_report import StateReport

log = get_logger(__name__)

Search: TypeAlias = Callable[[PlanQuestion, SearchPriority], Awaitable[Plan]]
"""Finds a plan, here or elsewhere."""

FACTS_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReplanRequest:
    """A question about the plan in force.

    Attributes:
        reason: why it is asked: a device came, leaves, or drifts.
        alive: devices that the holder sees alive, itself included.
        without: devices that are leaving.
        corrections: what training has shown of the profiles.
        work: how many times as much the plan's tasks take as it expected (`work_ratio`).
        lowered: what devices proved to have less memory of, by id.
        remaining_rounds: of training, before the job ends.
        moved_seconds_ago: ages of the changes of plan that nothing forced.
    """

    planning: JobPlanRequest
    in_force: PlanInForce
    reason: ReconfigureReason
    alive: frozenset[str]
    without: frozenset[str]
    corrections: ProfileCorrections
    work: float
    lowered: Mapping[str, MemoryBudgets]
    remaining_rounds: int
    moved_seconds_ago: tuple[float, ...]


class ReplanEvaluation:
    """Answers one request; `search` finds a plan from zero."""

    def __init__(
        self, mesh: Mesh, request: ReplanRequest, profiler: ClusterProfiler, search: Search
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._profiler = profiler
        self._search = search
        self._fixed = replan_decision.fixed_request(request.planning, request.in_force.plan)
        self._household: MeasuredCluster  # from `answer` on
        self._present: replan_decision.PresentPlan

    async def answer(self) -> tuple[ReplanDecision, frozenset[str]]:
        """What to do, and the ids of the devices whose speeds and links were known.

        Raises:
            PlanError: no plan was found.
            PeerError: this device does not say what it has.
        """
        request = self._request
        household = self._household = await self._measured_household()
        plan = request.in_force.named(self._mesh)
        present = self._present = await run_in_background(
            partial(replan_decision.present_plan, self._fixed, household, plan, request.work)
        )
        decision = await self._with_newcomers() or await self._best()
        log.info(
            "plan_considered",
            why=request.reason.value,
            action=decision.action.value,
            slower=round(present.slower, 3),
            reason=decision.reason,
        )
        return decision, frozenset(candidate.id for candidate in household.candidates)

    async def _decided(self, found: list[Plan]) -> ReplanDecision:
        ages = () if self._fixed.ftpipehd is not None else self._request.moved_seconds_ago
        return await run_in_background(
            partial(
                replan_decision.decide_replan,
                self._fixed,
                self._household,
                self._present,
                found,
                remaining_rounds=self._request.remaining_rounds,
                moved_seconds_ago=ages,
            )
        )

    async def _with_newcomers(self) -> ReplanDecision | None:
        """Planner pp is for all devices: those who came have a part, if that pays at all.

        What moves a border between the others may be faster still: they had to keep every device
        out. None: it does not pay, or is not for this planner.
        """
        if self._fixed.planner != "pp" or self._household.leaving or not self._newcomers:
            return None
        with suppress(PlanError):  # one of them has too little memory
            plan = await self._light(on_all=True)
            decision = await self._decided([plan])
            if decision.action is ReplanAction.MOVE and self._newcomers <= plan.device_names:
                return decision
        return None

    @property
    def _newcomers(self) -> frozenset[str]:
        """Names of those who have no part in the plan in force."""
        busy = self._request.in_force.assignment.devices
        return frozenset(c.name for c in self._household.candidates if c.id not in busy)

    async def _best(self) -> ReplanDecision:
        """From a plan close to the one in force, and the best of all kinds if that may be another.

        When nothing waits that one takes minutes: a close plan that pays is not delayed for it.

        Raises PlanError: there is neither.
        """
        question = PlanQuestion(self._fixed, self._household)
        if self._fixed.ftpipehd is not None:
            return await self._decided([await self._search(question, SearchPriority.ALONE)])
        haste = self._haste
        decision: ReplanDecision | None = None
        found, trouble = list[Plan](), PlanError("no plan was searched for")
        try:
            found.append(await self._light())
            decision = await self._decided(found)
        except PlanError as error:
            trouble = error
        paid = (
            decision is not None
            and decision.action is ReplanAction.MOVE
            and haste is SearchPriority.IDLE
        )
        has_new = bool(self._newcomers)
        wanted = replan_decision.wants_search(self._fixed, self._present, has_new=has_new)
        if wanted and not self._household.leaving and not paid:
            try:
                found.append(await self._search(question, haste))
                decision = await self._decided(found)
            except PlanError as error:
                trouble = error
        if decision is None:
            raise trouble
        return decision

    @property
    def _haste(self) -> SearchPriority:
        """Of a search during training."""
        waited_for = self._household.leaving or self._newcomers
        return (
            SearchPriority.PROMPT
            if waited_for or self._present.slower > replan_decision.URGENT
            else SearchPriority.IDLE
        )

    async def _light(self, *, on_all: bool = False) -> Plan:
        """Close to the plan in force. Raises PlanError: nothing fits."""
        present = self._present
        replicas = place_replicas(present.plan, chain=False)
        forced = REPAY_SECONDS if self._household.leaving else None
        is_wanted = self._haste is SearchPriority.PROMPT or present.is_off

        def light(run: ChildProcess) -> Plan:
            asked = self._fixed, self._household, present.plan, replicas
            return replan_cluster(*asked, ReplanMethod.LIGHT, forced, on_all=on_all, run=run)

        # Where it is wanted it is soon over, a start is not.
        with timed(log, "replanned"):
            return await run_in_child(
                light, SearchPriority.ALONE if is_wanted else SearchPriority.IDLE
            )

    # -- the household ---------------------------------------------------------------------------

    async def _measured_household(self) -> MeasuredCluster:
        """Every device's profile, memory and links; only newcomers are measured."""
        facts = await self._facts()
        planning, holder = self._request.planning, self._mesh.self_id
        known = {
            d: MeasuredDevice.of(d, self._name(d), state_report)
            for d, state_report in facts.items()
            if is_profiled(state_report, planning, holder)
        }
        new = {d: self._name(d) for d in facts if d not in known}
        strangers = sorted(facts.keys() - self._request.in_force.assignment.devices)
        if strangers or new:
            with timed(log, "newcomers_measured"):
                others = sorted(facts.keys() - set(strangers))
                await self._profiler.measure_new_links(strangers, others)
                known |= await self._measured(new, len(facts))
            await failpoints.reach("look.measured.after", device=self._mesh.self_id)
        asked = planning, known, holder, self._request.corrections, self._request.lowered
        usable, useless = await run_in_background(partial(usable_now, *asked))
        for out in useless:
            log.info("left_out_of_look", device=out.name, why=out.reason)
        return MeasuredCluster.of(
            usable.values(), self._profiler.links, self._name(holder), self._request.without
        )

    async def _facts(self) -> dict[str, StateReport]:
        members = self._mesh.members.values()
        here = {m.id for m in members if m.state is MemberState.ALIVE}
        wanted = sorted(here & self._request.alive)
        answers = await asyncio.gather(*(self._facts_of(device) for device in wanted))
        facts = {
            d: state_report
            for d, state_report in zip(wanted, answers, strict=True)
            if state_report is not None
        }
        if self._mesh.self_id not in facts:
            raise PeerError("the device with the data does not answer")
        for device, state_report in facts.items():
            self._profiler.learn(device, state_report.speeds)
        return facts

    async def _facts_of(self, device: str) -> StateReport | None:
        planning = self._request.planning
        fields = FactsRequest(planning.job, planning.digest).fields()
        try:
            reply = await self._mesh.call(
                device,
                Message(FACTS, fields),
                timeout_seconds=FACTS_TIMEOUT_SECONDS,
                reply_parts=limited(LARGE.most_bytes),
            )
            return await read_part(StateReport, reply)
        except (Error, TimeoutError) as error:
            log.info("no_facts", device=self._name(device), why=str(error) or "it took too long")
            return None

    async def _measured(self, new: Mapping[str, str], count: int) -> dict[str, MeasuredDevice]:
        """Those newcomers that can be measured."""
        found = await self._profiler.profile(self._fixed, self._mesh.self_id, new, count)
        for out in found.values():
            if isinstance(out, LeftOut):
                log.info("newcomer_left_out", device=out.name, why=out.reason)
        return {d: answer for d, answer in found.items() if isinstance(answer, MeasuredDevice)}

    def _name(self, device: str) -> str:
        return display_name(self._mesh, device)
