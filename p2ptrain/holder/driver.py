"""Drives a job from generation to generation on the device with the data: shell of `holder_core`.

    have all devices made ready ──► begin ──► rounds ──► weights are fetched
            ▲                                   │ a device dies, a link breaks
            └───────────────────────────────────┘

Each number is reported once, however often its steps are computed again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Concatenate

from p2ptrain import failpoints
from p2ptrain.aio.tasks import TaskOwner
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.errors import Error, PeerError, PlanError, TrainingError
from p2ptrain.holder.planning.plan_step import ReconfigureRequest
from p2ptrain.holder.planning.planner_client import Planner
from p2ptrain.holder.planning.reconfiguration import Reconfiguration, ReconfigureReply
from p2ptrain.holder.planning.replan_watcher import ReplanWatcher
from p2ptrain.holder.reports import JobReports
from p2ptrain.holder.rounds.generation_runner import GenerationRunner, GenerationWork
from p2ptrain.holder.snapshots.full_snapshots import whole_copies
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.holder.start import job_registry
from p2ptrain.holder.start.journal import Journal
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.interface import (
    LinkLost,
    LinkUp,
    MemberChanged,
    MemberState,
    Mesh,
    MeshEvent,
    MeshMember,
)
from p2ptrain.messages.assign import PlanInForce
from p2ptrain.messages.calls import Hangs
from p2ptrain.messages.plan_request import JobPlanRequest, PassedOver, send_passed_over
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.choose_version import FullSnapshot, StateLost
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.cores.holder_port import HolderPhase, P, PortCall
from p2ptrain.recovery.cores.job_history import NotedHistory
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.version import Version

log = get_logger(__name__)

PASSED_OVER_SECONDS = 600.0
"""A device that hangs is started again by then; one that lies costs a moment every ten minutes."""


class JobDriver:
    """Runs a job until it is done. Create it, then `run` once.

    Attributes:
        reports: what the user sees.
        copies: the versions that one can go back to.
        replan_watcher: what rounds take, and whether another plan is better.

    Args:
        planning: what is planned for first.
        unit_names: of the model's units, for messages.
        work: what the job does in a generation.
        journal: what it has behind it.
        held: the versions that this device has all of.
        steps: updates in all; None = it is not known.
        recovery: how it is planned after a device is gone.
        profiler: what is known of the household's links.
        settings: of its recovery rules.
        replans: whether the plan may change while no device joins or leaves.
        leaves_out: updates may be left out, or skipped.
        given: the user's plan, to begin with.
        faulty: devices that get no work any more.
        writes_checkpoints: as long as it takes to come there, the beginning is gone back to.
    """

    def __init__(
        self,
        mesh: Mesh,
        planning: JobPlanRequest,
        unit_names: Sequence[str],
        work: GenerationWork,
        journal: Journal,
        held: Callable[[], Collection[Version]],
        reports: JobReports,
        steps: int | None,
        recovery: ReplanMethod = ReplanMethod.LIGHT,
        *,
        profiler: ClusterProfiler,
        settings: RecoverySettings = HOME,
        replans: bool = True,
        leaves_out: bool = False,
        given: Plan | None = None,
        faulty: frozenset[str] = frozenset(),
        writes_checkpoints: bool = False,
    ) -> None:
        self._mesh = mesh
        self._planning = planning
        self._work = work
        self._recovery = recovery
        self._given = given  # until it is in force
        self._journal, self._held, self._writes = journal, held, writes_checkpoints
        self._settings = settings
        self._core = HolderCore(
            mesh.self_id,
            self,
            len(unit_names),
            reports.reported.step,
            journal=journal.noted,
            clips=planning.clip or leaves_out,
            asynchronous=self._settled().asynchrony is not None,
            settings=settings,
            faulty=faulty,
            copies=self._copies,
        )
        self.reports = reports
        published = planning.ftpipehd
        fixed = None if published is None else published.copies
        self.copies = SnapshotManager(
            *(mesh, planning.job, self._on_stable, self.reports.warn, fixed, settings),
            is_on=planning.replicas,
        )
        self._resting: set[str] = set()  # where one is heard of again, it has come back
        self._planner = Planner(mesh, self._pass_over, settings.plan_limits)
        self.replan_watcher = ReplanWatcher(
            mesh,
            planning,
            self._planner,
            profiler,
            self._core,
            lambda: reports.remaining(steps),
            lambda reason, leaver: self._tell(self._core.change_wanted, reason, leaver),
            replans=replans,
            settings=settings,
        )
        self._todo: deque[PortCall] = deque()
        self._carrying_out = False
        self._changed = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = TaskOwner(lambda _, error: self._fail(error))
        self._asking: asyncio.Task[None] | None = None
        self._unit_names = unit_names
        # the one in force, or that the rules are about to accept
        self._answer: ReconfigureReply | None = None
        self._refusal: ReconfigureFailure | None = None  # of the newest request, if it had none
        self._notified = ""  # the reported reason why nothing begins
        self._runs = GenerationRunner(
            *(mesh, work, self.reports, self._tasks, self._core, self._tell, self._is_hanging),
            settings,
        )
        self._profiler = profiler
        profiler.hangs = self._is_hanging

    async def run(self, since: float) -> None:
        """Train to the end, whatever happens to the devices.

        Args:
            since: when this process began, by `time.monotonic`.

        Raises:
            PlanError: nothing fits.
            DeviceLost: what a device had is nowhere any more.
            Error: whatever else ends the job.
        """
        self.replan_watcher.start()
        unsubscribe = self._watch_members()
        self._tasks.spawn(self._tick(), "watch the time")
        self._tasks.spawn(self._journal.keep_synced(), "sync the journal")
        if self._journal.in_force is not None:
            self.reports.trouble(since)
        try:
            for error in self._profiler.hanging:
                self._is_hanging(error)
            self._do(self._core.start(since))
            await self._over
        finally:
            unsubscribe()
            await self.replan_watcher.close()
            await self._tasks.cancel()
            await self.copies.close()
            self._runs.close()

    # -- what happens ----------------------------------------------------------------------------

    @property
    def question(self) -> PlanQuestion | None:
        """The last one that was asked for a plan."""
        return self._planner.question

    @property
    def faulty(self) -> frozenset[str]:
        """Devices that get no work any more."""
        return self._core.faulty

    def counts(self, step: int) -> None:
        """`step` updates count."""
        self._tell(self._core.step_committed, step)

    def lengthen(self, longest: tuple[int, ...], stretch: float) -> None:
        """Batches come that are longer than those planned for: another plan, between two rounds."""
        self._planning = replace(self._planning, longest=longest, stretch=stretch)
        self.replan_watcher.lengthen(longest, stretch)
        self._tell(self._core.change_wanted, ReconfigureReason.DRIFT)

    def note_link(self, one: str, other: str, back: bool) -> None:
        """The link between two devices broke, or is back."""
        log.info("link_of_others", says=one, of=other, back=back)
        if back:
            self._link_back(one, other)
        elif self._runs.link_ended(one, other):
            self._tell(self._core.link_broke, one, other)

    def _link_back(self, one: str, other: str) -> None:
        if one == self._mesh.self_id:
            # others may have reported it alive before it could receive anything
            self._tasks.spawn(self._welcome(other), f"welcome {other[:12]}")
        self._tell(self._core.link_back, one, other)

    def _died(self, device: str, *, certain: bool, left: bool = False) -> None:
        if self._runs.generation is not None:
            self.reports.hint(device, self._runs.generation.memory_hint(device))
        self._tell(self._core.member_died, device, certain=certain, left=left)
        self.replan_watcher.gone(device)

    def _watch_members(self) -> Callable[[], None]:
        """Take in the present state and every change until the returned function is called."""
        unsubscribe = self._mesh.subscribe(self._on_mesh_event)
        for member in self._mesh.members.values():
            if member.state is MemberState.ALIVE:
                self._on_member(member)
        return unsubscribe

    def _on_mesh_event(self, event: MeshEvent) -> None:
        match event:
            case MemberChanged(member, _, certain, described):
                rested = member.id in self._resting
                if not described or rested is not member.rests:
                    self._on_member(member, certain=certain)
            case LinkLost(peer):
                self._tell(self._core.link_broke, self._mesh.self_id, peer)
            case LinkUp(peer):
                self._link_back(self._mesh.self_id, peer)

    def _on_member(self, member: MeshMember, *, certain: bool = False) -> None:
        device, state = member.id, member.state
        if self._planning.alone and device != self._mesh.self_id:
            return
        if not member.rests:
            self._resting.discard(device)
        match state:
            case MemberState.ALIVE if member.rests and device != self._mesh.self_id:
                # It has handed its work over and keeps nothing: as one that has left.
                self._resting.add(device)
                self._died(device, certain=True, left=True)
            case MemberState.ALIVE:
                if device != self._mesh.self_id:
                    self._tasks.spawn(self._welcome(device), f"welcome {device[:12]}")
                self._tell(self._core.member_appeared, device)
                self.replan_watcher.appeared(device)
            case MemberState.DEAD | MemberState.LEFT:
                self._died(device, certain=certain, left=state is MemberState.LEFT)
            case MemberState.SUSPECT:
                pass  # it may refute

    async def _welcome(self, device: str) -> None:
        seconds = self._settings.answer_seconds
        await job_registry.end_other_jobs(self._mesh, device, self._planning.job, seconds)
        await self._runs.welcome(device, lambda: self._core.phase is HolderPhase.TRAINING)

    async def _tick(self) -> None:
        while True:
            self._changed.clear()
            due = self._core.next_wakeup
            try:
                async with asyncio.timeout(
                    None if due == float("inf") else max(due - monotonic(), 0.0)
                ):
                    await self._changed.wait()
            except TimeoutError:
                self._tell(self._core.tick)

    def _copies(self) -> tuple[FullSnapshot, ...]:
        made, in_force = self.reports.steps_made, self._journal.in_force
        round_seconds = None if in_force is None else in_force.plan.predicted.round_seconds
        if made:
            round_seconds = self.reports.seconds / made
        # A user who writes checkpoints wants to resume from them, however long it takes; and to
        # the beginning rather than to nothing, where none can be read.
        seconds = None if self._writes else round_seconds
        first = Version(self._planning.first_step, 0)
        return whole_copies(self._mesh.self_id, self._held(), first, seconds, self._settings)

    # -- the rules -------------------------------------------------------------------------------

    def _tell(
        self,
        event: Callable[Concatenate[float, P], list[PortCall]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        self._do(event(monotonic(), *args, **kwargs))

    def _do(self, calls: list[PortCall]) -> None:
        self._changed.set()
        self._todo.extend(calls)
        if not self._carrying_out and not self._over.done():
            self._go_on()

    def _go_on(self) -> None:
        """Do what is to be done, as far as nothing must be on the disk first."""
        self._carrying_out = True
        writing: Coroutine[Any, Any, None] | None = None
        try:
            while self._todo and writing is None:
                writing = self._todo.popleft()()
        except Exception as error:  # ends the job, wherever the event came from
            self._fail(error)
        if writing is None:
            self._carrying_out = False
        else:
            self._tasks.spawn(self._after(writing), "write the journal")

    async def _after(self, writing: Coroutine[Any, Any, None]) -> None:
        await writing
        self._carrying_out = False
        self._do([])

    # -- what the rules have done: see `HolderPort` ----------------------------------------------

    def write_down(self, noted: NotedHistory) -> Coroutine[Any, Any, None] | None:
        """With the plan made ready last, which may be what they accept."""
        answer = self._answer
        newest = None if answer is None else PlanInForce(answer.assignment, answer.plan)
        return self._journal.write_down(noted, newest)

    def drain_rounds(self) -> None:
        """What is held here may be resumed from, and stays."""
        self.copies.drain()
        self._runs.drain()

    def prepare(self, ask: GenerationRequest) -> None:
        """A newer one takes the place of what is asked for."""
        if self._asking is not None:
            self._asking.cancel()
        self._asking = self._tasks.spawn(self._ask(ask), "make a generation ready")

    def retain_only(self, versions: tuple[Version, ...], alive: frozenset[str]) -> None:
        """In the background."""
        self.copies.keep_only(versions, alive)

    def collect_weights(self, _placed: Placement) -> None:
        """Of the generation in force."""
        self._runs.bring_home()

    def report_failure(self, device: str) -> None:
        """With what may have become of it."""
        self.reports.failure(device, is_short=self._runs.is_short(device))

    def report_waiting(self, devices: tuple[str, ...]) -> None:
        """By their names."""
        self.reports.waiting(devices)

    def grant_leave(self, device: str) -> None:
        """One that has only paused is a newcomer when it is back."""
        self.replan_watcher.gone(device)
        self._resting.add(device)

    def deny_leave(self, device: str, reason: str) -> None:
        """It hears why."""
        self.replan_watcher.keep(device, reason)

    # -- asking ----------------------------------------------------------------------------------

    def stop_rounds(self) -> None:
        """And the way home of the weights."""
        self.reports.trouble()
        self.copies.end_generation()
        self._runs.freeze()

    async def _ask(self, ask: GenerationRequest) -> None:
        await self._runs.ended()
        proposed = self.replan_watcher.asked(ask)
        request = ReconfigureRequest(
            self._settled(),
            ask,
            self._journal.in_force,
            self._recovery,
            self.replan_watcher.corrections,
            proposed,
            self._given,
            wants_expected=not self.replan_watcher.knows_plan,
        )
        with timed(log, "generation_made_ready"):
            change = Reconfiguration(
                self._mesh,
                request,
                self._profiler,
                self._planner,
                self._is_hanging,
                self._settings,
            )
            reply = await change.answer()
        if isinstance(reply, ReconfigureFailure):
            self._tell_refused(reply)
            self._refusal = reply
            self._tell(self._core.refused, reply)
            return
        await self._work.checked()
        await failpoints.reach("accept.before", device=self._mesh.self_id)
        self._take(reply, ask.generation)

    def _tell_refused(self, refusal: ReconfigureFailure) -> None:
        """Report a reason that stays, such as another job: it may stay for hours."""
        last = self._refusal
        stays = refusal.again and last is not None and last.reason == refusal.reason
        if stays and self._notified != refusal.reason:
            self._notified = refusal.reason
            self.reports.warn(f"this job waits, and asks again: {refusal.reason}")

    def _take(self, reply: ReconfigureReply, number: int) -> None:
        # The rules may refuse it; then the plan in force stays the old one.
        old, self._answer = self._answer, reply
        self._tell(self._core.generation_ready, number, reply.assignment.placed)
        placed = self._core.history.placed
        if placed is None or placed.generation != reply.assignment.key.generation:
            self._answer = old
        else:
            self._refusal = self._given = None

    def _is_hanging(self, error: Hangs) -> None:
        """It is as if the device had died, until it has started again."""
        device, name = error.device, self.reports.name(error.device)
        if device not in self._core.alive:
            return
        self.reports.faulty[name] = str(error)
        self.reports.warn(f"{error}: this job continues without {name} until it starts again", name)
        office = self._mesh.coordinator
        if office is not None and device == office.id:
            self._distrust(device)
        self._died(device, certain=False)

    def _pass_over(self, device: str, why: str) -> None:
        """Ask a coordinator no more for a while, and notify the devices of this job."""
        minutes, name = PASSED_OVER_SECONDS / 60, self.reports.name(device)
        self.reports.warn(
            f"{name}, which plans the work, {why}: another device does that for "
            f"{minutes:.0f} minutes",
            name,
        )
        self._distrust(device)

    def _distrust(self, device: str) -> None:
        self._mesh.distrust(device, PASSED_OVER_SECONDS)
        said = PassedOver(self._planning.job, device, PASSED_OVER_SECONDS)
        for other in sorted(self._core.alive - {self._mesh.self_id, device}):
            self._tasks.spawn(send_passed_over(self._mesh, other, said), "say who is passed over")

    def _settled(self) -> JobPlanRequest:
        """The plan in force has decided on the mode, where that was open."""
        in_force = self._journal.in_force
        if in_force is None:
            return self._planning
        asynchronous = in_force.assignment.asynchrony is not None
        return self._planning.settled(asynchronous=asynchronous)

    # -- a generation -----------------------------------------------------------------------------

    def begin(self, placed: Placement, reason: ReconfigureReason, alive: frozenset[str]) -> None:
        """Of the newest answer; first the user hears of its plan."""
        answer = self._answer
        assert answer is not None
        version = answer.choice.version
        self.reports.goes_on_from(version.step)
        self._core.asynchronous = answer.assignment.asynchrony is not None
        self._work.announce(answer, reason)
        self._runs.begin(answer, alive)
        self.copies.begin(answer.assignment, answer.made.protected.cost, self._core.history.stable)
        self.reports.begin(answer, after_trouble=reason is ReconfigureReason.FAILURE)
        self.replan_watcher.began(answer)
        if not self._core.finishing or version.step < self.reports.reported.step:
            self._runs.train()

    def _on_stable(self, version: Version) -> None:
        self._tell(self._core.snapshot_stable, version, self.copies.read)

    # -- the end ---------------------------------------------------------------------------------

    def stop_job(self, reason: str | None = None, lost: StateLost | None = None) -> None:
        """With the error that says what is lost, and who is faulty."""
        if reason is None:
            if not self._over.done():
                self._over.set_result(None)
            return
        error = self._ended_by(reason)
        if self._core.faulty:
            names = ", ".join(sorted(self.reports.name(device) for device in self._core.faulty))
            reasons = "; ".join(self.reports.faulty.values())
            why = f"{error}. The others cannot go on without {names} ({reasons})"
            error = TrainingError(why)
        self._fail(error)

    def _ended_by(self, reason: str) -> Error:
        """The error that the job ends with, where the rules end it."""
        refusal = self._refusal
        lost = None if refusal is None else refusal.lost
        if refusal is not None and refusal.is_plan:
            return PlanError(reason)
        if lost is not None:
            first, last = (self._unit_names[unit] for unit in (lost.units[0], lost.units[-1]))
            layers = first if first == last else f"{first} to {last}"
            return self.reports.lost(reason, lost.last_places, layers)
        return PeerError(reason)

    def end_part(self, first: int, end: int, devices: tuple[str, ...]) -> None:
        """With what a person may try."""
        names = ", ".join(self.reports.name(device) for device in devices)
        units = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
        error = TrainingError(
            f"{units} ended p2ptrain on {len(devices)} devices right after the start ({names}), "
            "so the training stops before more end. Something in these layers crashes, or needs "
            "more memory than there is: see `dmesg` there. Start those devices again, and try "
            "--local"
        )
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)
