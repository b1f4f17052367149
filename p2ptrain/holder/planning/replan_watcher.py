"""Members that join, leave or slow down while a job trains: the holder's shell of two rules.

rounds' reports ──► drift watch ──┐
members join and leave ───────────┴─► evaluate ──► change between rounds
a device sends `job.leaving` ───────► answered once nothing depends on it any more
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.errors import Error, PeerError, PlanError
from p2ptrain.holder.planning.evaluate_replan import ReplanEvaluation, ReplanRequest
from p2ptrain.holder.planning.planner_client import Planner
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh, display_name
from p2ptrain.messages.assign import PlanInForce
from p2ptrain.messages.job_requests import JobQuestion, LeaveReply
from p2ptrain.messages.kinds import LEAVING
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.net.message import Message
from p2ptrain.plan.replan.hysteresis import ReplanAction
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.recovery import replan_trigger
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.drift_watch import (
    DriftWatch,
    RepartitionSchedule,
    capacities,
    expected_with,
    is_off,
)
from p2ptrain.recovery.generation_request import GenerationRequest, ReconfigureReason
from p2ptrain.recovery.profile_corrections import (
    ExpectedSeconds,
    ProfileCorrections,
    StageSeconds,
    as_they_are,
    work_ratio,
)
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

log = get_logger(__name__)

RECENT_ROUNDS = 20

LOOK_SECONDS = 120.0
"""A newcomer fetches the model and measures it, and plans are searched for on a busy device."""

DRIFT_LOOK_SECONDS = 1800.0
"""Nothing waits: plans are searched in the time that training leaves."""

LEAVE_LOOK_SECONDS = 3.0
"""A device waits: what is not found by then is found while training stands."""

_LIMITS_SECONDS = {
    ReconfigureReason.LEAVE: LEAVE_LOOK_SECONDS,
    ReconfigureReason.DRIFT: DRIFT_LOOK_SECONDS,
}


class ReplanWatcher:
    """See the module. Create it in a running event loop, `start` it and `close` it.

    Args:
        rules: the job's.
        remaining_rounds: of training.
        want: called with the reason to change the plan, and the device that leaves.

    Attributes:
        corrections: what training has shown of the profiles.
        recent: seconds of the last rounds of the plan in force, and what its tasks took.
    """

    def __init__(
        self,
        mesh: Mesh,
        planning: JobPlanRequest,
        planner: Planner,
        profiler: ClusterProfiler,
        rules: HolderCore,
        remaining_rounds: Callable[[], int],
        want: Callable[[ReconfigureReason, str | None], None],
        *,
        replans: bool,
        settings: RecoverySettings = HOME,
    ) -> None:
        self.corrections = ProfileCorrections()
        self._mesh = mesh
        self._settings = settings
        self._planning = planning
        self._planner, self._profiler = planner, profiler
        self._rules, self._remaining_rounds = rules, remaining_rounds
        self._want = want
        self._core = replan_trigger.ReplanTrigger(mesh.self_id, replans=replans, settings=settings)
        self._answer: ReconfigureReply | None = None
        self._expected: Mapping[Seat, ExpectedSeconds] = {}
        self._promised: Mapping[Seat, ExpectedSeconds] = {}  # as the plan in force was made
        self._work = 1.0
        self._watch: DriftWatch | None = None
        wished = planning.ftpipehd
        self._repartition: RepartitionSchedule | None = None
        if wished is not None:
            self._repartition = RepartitionSchedule(wished.first_repartition, wished.repartition)
        self._round_at = monotonic()
        self.recent: deque[tuple[float, Mapping[Seat, CpuSpan]]] = deque(maxlen=RECENT_ROUNDS)
        self._proposed: tuple[ReconfigureReason, Plan] | None = None
        self._was_asked_for: ReconfigureReason | None = None
        self._tasks = TaskOwner()
        self._looking: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None
        # who waits for our word: None = it may go, else why not
        self._leavers: dict[str, asyncio.Future[str | None]] = {}

    def start(self) -> None:
        """From now on devices may say that they leave."""
        self._mesh.route(LEAVING, self._on_leaving)

    async def close(self) -> None:
        """The job is over: waiting leavers may go."""
        self._mesh.unroute(LEAVING)
        await self._tasks.cancel()
        if self._due is not None:
            self._due.cancel()
        for device in list(self._leavers):
            self.let_go(device)

    # -- what happens ----------------------------------------------------------------------------

    def appeared(self, device: str) -> None:
        """It is alive, perhaps again."""
        self._do(self._core.joined(device, monotonic()))

    def gone(self, device: str) -> None:
        """It has left, or died: a device that has only paused is a newcomer when it is back."""
        self.let_go(device)  # its next process may leave too
        self._do(self._core.gone(device, monotonic()))

    @property
    def promised(self) -> Mapping[Seat, ExpectedSeconds]:
        """What rounds should take as the plan in force was made."""
        return self._promised

    @property
    def plan(self) -> Plan | None:
        """The one in force."""
        return None if self._answer is None else self._answer.plan

    @property
    def knows_plan(self) -> bool:
        """Whether a plan has come into force in this process, and so what rounds should take."""
        return self._answer is not None

    def asked(self, ask: GenerationRequest) -> Plan | None:
        """A generation is asked for; returns the plan that was found for it already."""
        self._cancel_look()
        self._watch, self._was_asked_for = None, ask.reason
        self._do(self._core.ended(monotonic()))
        if self._proposed is None or self._proposed[0] is not ask.reason:
            return None
        return self._proposed[1]

    def lengthen(self, longest: tuple[int, ...], stretch: float) -> None:
        """Batches have come that are longer than those planned for."""
        self._planning = replace(self._planning, longest=longest, stretch=stretch)
        self._proposed = None

    def began(self, answer: ReconfigureReply) -> None:
        """A generation is in force."""
        self.recent.clear()
        is_new, expected = bool(answer.made.considered), answer.made.expected
        if is_new or self._answer is None:
            self._expected = self._promised = expected  # of some tiles nothing is
            self._work, self._watch = 1.0, None
        self._answer, self._proposed = answer, None
        asynchronous = answer.assignment.asynchrony is not None
        self._planning = self._planning.settled(asynchronous=asynchronous)
        if self._expected.keys() == set(_seats(answer)):
            if self._repartition is not None:
                self._repartition.begin(self._expected.keys())
            else:
                self._watch = DriftWatch(self._expected, self._settings)
        self._round_at = monotonic()
        in_haste = self._was_asked_for is ReconfigureReason.FAILURE and is_new and bool(expected)
        devices = frozenset(answer.assignment.devices)
        asked = devices, monotonic(), answer.made.considered
        self._do(self._core.began(*asked, in_haste=in_haste))

    def busy(self, spans: Mapping[Seat, CpuSpan], *, copying: bool) -> None:
        """What a round of training has taken; `copying`: beside copies of stages on their way."""
        now = monotonic()
        seconds, self._round_at = now - self._round_at, now
        self.recent.append((seconds, spans))
        busy = {seat: StageSeconds(span.wall, span.cpu) for seat, span in spans.items()}
        if self._repartition is not None:
            self._compare_capacities(self._repartition.observe(busy, seconds))
            return
        if self._watch is None or self._answer is None:
            return
        look = self._watch.observe(busy, seconds, copying=copying)
        if look is None:
            return
        places = enumerate(self._answer.assignment.stages)
        ranges = {index: (place.first, place.end) for index, place in places}
        self.corrections = self.corrections.learned(ranges, self._expected, look.busy)
        factors = {seat: due.factor(look.busy[seat]) for seat, due in self._expected.items()}
        by_name = {f"{seat[0]}/{self._name(seat[1])}": round(f, 3) for seat, f in factors.items()}
        self._work = work_ratio(self._promised, look.busy)
        log.info("compared_with_plan", why=look.reason, factors=by_name, work=round(self._work, 3))
        self._expected = as_they_are(self._expected, look.busy)
        self._watch.settle(self._expected)
        # A plan that was asked for by name is obeyed as long as devices do what it expects.
        off = any(is_off(factor) for factor in factors.values())
        if self._planning.planner == "auto" or self._core.in_haste or off:
            self._do(self._core.compared(monotonic()))

    def pause_over(self) -> None:
        """Something that is no training took the time until now: an evaluation."""
        self._round_at = monotonic()

    def _compare_capacities(self, busy: Mapping[Seat, StageSeconds] | None) -> None:
        """What devices have reported goes into the next plan, which is looked for now."""
        if busy is None:
            return
        before, share = self.corrections, self._settings.repartition_judged_share
        self.corrections = capacities(before, self._expected, busy, share)
        self._expected = expected_with(self._expected, before, self.corrections)
        by_name = {self._name(d): round(c, 3) for d, c in self.corrections.devices.items()}
        log.info("capacities", devices=by_name)
        self._do(self._core.compared(monotonic()))

    # -- leaving ---------------------------------------------------------------------------------

    async def _on_leaving(self, peer: str, message: Message) -> Message:
        if JobQuestion.read(message.fields).job != self._planning.job:
            raise PeerError("that job has ended")
        await self._reach("leave.receive.before")
        waiting = self._leavers.get(peer)
        if waiting is None:
            waiting = self._leavers[peer] = asyncio.get_running_loop().create_future()
            log.info("device_leaves", name=self._name(peer))
            self._do(self._core.leaving(peer, monotonic()))
        refused = await asyncio.shield(waiting)  # one without a part is let go at once
        await self._reach("leave.answer.before")
        return Message(LEAVING, LeaveReply(refused).fields())

    def let_go(self, device: str) -> None:
        """Nothing depends on a device that leaves any more."""
        self._answer_leaver(device, None)

    def keep(self, device: str, reason: str) -> None:
        """Deny a leave: the others cannot do without the device."""
        log.info("leave_refused", name=self._name(device), why=reason)
        if self._proposed is not None and self._proposed[0] is ReconfigureReason.LEAVE:
            self._proposed = None  # what was found could not be made ready
        self._answer_leaver(device, reason)

    def _answer_leaver(self, device: str, refused: str | None) -> None:
        waiting = self._leavers.pop(device, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(refused)

    # -- the rules -------------------------------------------------------------------------------

    def _do(self, instructions: list[replan_trigger.ElasticInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case replan_trigger.EvaluateNow():
                    self._cancel_look()
                    look = self._look(instruction)
                    self._looking = self._tasks.spawn(look, "look for a better plan")
                case replan_trigger.RefuseLeave(device, reason):
                    self.keep(device, reason)
                case replan_trigger.AdoptPlan(reason, leaver):
                    self._want(reason, leaver)
        if self._due is not None:
            self._due.cancel()
            self._due = None
        wait = self._core.next_wakeup - monotonic()
        if wait < float("inf"):
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(max(wait, 0.0), self._tick)

    def _tick(self) -> None:
        self._due = None
        self._do(self._core.tick(monotonic()))

    def _cancel_look(self) -> None:
        """What is looked for is not wanted any more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self, look: replan_trigger.EvaluateNow) -> None:
        limit = _LIMITS_SECONDS.get(look.reason, LOOK_SECONDS)
        await self._reach("look.ask.before")
        try:
            async with asyncio.timeout(limit):
                found, in_sight = await self._evaluation(look).answer()
        except Exception as error:  # whatever waits for the look is answered; training continues
            if isinstance(error, Error | TimeoutError):
                log.info("not_looked", why=str(error) or "it took too long")
            else:
                log.error("not_looked", why=repr(error), exc_info=error)
            self._looking = None
            why = str(error) if isinstance(error, PlanError) else None
            self._do(self._core.failed(look.number, monotonic(), why))
            return
        log.info("looked", reason=look.reason.value, gain=found.gain, found=found.reason)
        await self._reach("look.found.before")
        self._looking = None
        devices: frozenset[str] = frozenset()
        if found.action is ReplanAction.MOVE:
            ids = {member.name: member.id for member in self._mesh.members.values()}
            devices = frozenset(ids.get(name, name) for name in found.plan.device_names)
            self._proposed = self._reason_for(look, devices), found.plan
        self._do(self._core.answered(look.number, devices, in_sight, monotonic()))

    def _reason_for(
        self, look: replan_trigger.EvaluateNow, devices: frozenset[str]
    ) -> ReconfigureReason:
        assert self._answer is not None
        if look.reason is ReconfigureReason.LEAVE:
            return ReconfigureReason.LEAVE
        return (
            ReconfigureReason.JOIN
            if devices - set(self._answer.assignment.devices)
            else ReconfigureReason.DRIFT
        )

    def _evaluation(self, look: replan_trigger.EvaluateNow) -> ReplanEvaluation:
        answer = self._answer
        if answer is None:
            raise PeerError("no plan is in force")
        request = ReplanRequest(
            planning=self._planning,
            in_force=PlanInForce(answer.assignment, answer.plan),
            reason=look.reason,
            alive=self._rules.alive - self._rules.faulty,
            without=look.without,
            corrections=self.corrections,
            work=self._work,
            lowered=self._rules.lowered,
            remaining_rounds=self._remaining_rounds(),
            moved_seconds_ago=look.moved_seconds_ago,
        )
        return ReplanEvaluation(self._mesh, request, self._profiler, self._planner.search)

    async def _reach(self, name: str) -> None:
        await failpoints.reach(name, device=self._mesh.self_id)

    def _name(self, device: str) -> str:
        return display_name(self._mesh, device)


def _seats(answer: ReconfigureReply) -> list[Seat]:
    stages = enumerate(answer.assignment.stages)
    return [(index, device) for index, place in stages for device in place.devices]
