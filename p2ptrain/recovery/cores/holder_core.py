"""What a holder does about trouble: wait, have a generation prepared, accept it, begin; repeat.

    STARTING ──► ASKING ──► TRAINING ──► DRAINING ─┐       between rounds: join, leave, drift
                  ▲ ▲          │ trouble           │
                  │ └───── SETTLING ◄──────────────┤       the grace period
                  │                                ▼
                  └──────── WAITING ◄── lost, but not for certain

The holder owns what is true: the history, which generation counts, which step was reported. A
change is final when the journal has it; before that no device is ordered to begin. Pure: feed
events and ticks with the time (seconds of any monotonic clock), carry out what it returns in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from p2ptrain.errors import InternalError
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.choose_version import FullSnapshot, VersionChoice
from p2ptrain.recovery.cores import holder_events, holder_instructions
from p2ptrain.recovery.cores.job_history import JobHistory
from p2ptrain.recovery.cores.liveness import DeviceLiveness, FailureGracePeriod
from p2ptrain.recovery.cores.retry_policy import (
    AwaitDevices,
    EarlyDeaths,
    KeepLeavers,
    RetryLater,
    RetryPolicy,
)
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings

START_SECONDS = 3.0
"""Longest wait of a holder that was started again for the members of its last plan."""

_NEVER = float("inf")


class HolderPhase(StrEnum):
    """What the job does."""

    STARTING = "starting"
    TRAINING = "training"
    DRAINING = "draining"
    SETTLING = "settling"
    ASKING = "asking"
    WAITING = "waiting"
    OVER = "over"


class HolderCore:
    """See the module.

    Args:
        holder: own id.
        units: of the model.
        journal: what an earlier process of this job wrote last; None = a new job.
        reported: updates that were reported, or that the job begins with.
        clips: whether updates need a clipping coefficient.
        faulty: devices that get no work from the start.
        copies: the whole copies that training could go on from now.

    Attributes:
        asynchronous: whether stages update by themselves; where the first plan decides, it is set
            when that comes into force.
        phase: what the job does.
        history: what is true of the job.
        finishing: all steps are committed, the weights come home.
    """

    def __init__(
        self,
        holder: str,
        units: int,
        reported: int,
        *,
        journal: holder_instructions.WriteJournal | None = None,
        clips: bool = False,
        asynchronous: bool = False,
        settings: RecoverySettings = HOME,
        faulty: frozenset[str] = frozenset(),
        copies: Callable[[], tuple[FullSnapshot, ...]] = tuple,
    ) -> None:
        self.asynchronous = asynchronous
        self.phase = HolderPhase.STARTING
        self.history = JobHistory(journal, reported, copies)
        self.finishing = False
        self._holder = holder
        self._units = units
        self._clips = clips
        # until it is seen, a device with a part before a restart may still have it
        took_part = dict(journal.took_part) if journal else {}
        self._there = DeviceLiveness(holder, took_part, self.history.parts)
        self._settling = FailureGracePeriod(holder, settings)
        self._refusals = RetryPolicy()
        self._early = EarlyDeaths()
        self._leaving: set[str] = set()
        self._faulty = set(faulty)
        self._reason = (
            ReconfigureReason.START if self.history.placed is None else ReconfigureReason.FAILURE
        )
        self._number = 0
        self._due = _NEVER  # of the present phase
        self._waits_for: tuple[str, ...] | None = None  # as reported last
        self._now = float("-inf")
        self._out: list[holder_instructions.HolderInstruction] = []

    @property
    def next_wakeup(self) -> float:
        """When to call `tick` at the latest."""
        return _NEVER if self.phase is HolderPhase.OVER else self._due

    @property
    def number(self) -> int:
        """Of the newest request."""
        return self._number

    @property
    def alive(self) -> frozenset[str]:
        """Devices that are alive, this one included."""
        return frozenset(self._there.alive)

    @property
    def lowered(self) -> Mapping[str, MemoryBudgets]:
        """Memory in bytes that devices proved to have less of."""
        return dict(self._refusals.lowered)

    @property
    def faulty(self) -> frozenset[str]:
        """Devices that get no work any more."""
        return frozenset(self._faulty)

    def start(self, now: float) -> list[holder_instructions.HolderInstruction]:
        """Begin; a holder that was started again gives its members a moment to be found."""
        self._now = max(now, self._now)
        self._due = now + START_SECONDS if self.history.placed is not None else now
        self._step()
        return self._finish()

    def tick(self, now: float) -> list[holder_instructions.HolderInstruction]:
        """Do what is due."""
        self._now = max(now, self._now)
        self._step()
        return self._finish()

    def handle(
        self, event: holder_events.HolderEvent, now: float
    ) -> list[holder_instructions.HolderInstruction]:
        """Take in one event."""
        self._now = max(now, self._now)
        if self.phase is not HolderPhase.OVER:
            self._on(event)
            self._step()
        return self._finish()

    def _finish(self) -> list[holder_instructions.HolderInstruction]:
        out, self._out = self._out, []
        return out

    def _on(self, event: holder_events.HolderEvent) -> None:
        match event:
            case holder_events.AboutMember():
                self._on_member(event)
            case holder_events.LinkBroken(one, other):
                self._on_link_trouble(one, other)
            case holder_events.LinkRestored(one, other):
                self._settling.link_back(one, other)
            case holder_events.DeviceOutOfMemory(device, memory):
                known = self._refusals.lowered.get(device, memory)  # perhaps of the other memory
                self._refusals.lowered[device] = memory.at_most(known)
                self._trouble()
            case holder_events.RoundInterrupted(reason):
                if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING):
                    self._settling.broke_off(reason, self._now)
                    self._trouble()
            case holder_events.RoundStalled(devices):
                if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING):
                    self._settling.stood_still(devices)
                    self._trouble()
            case holder_events.Faulty(device, cleared):
                self._faulty -= cleared
                if device is not None:
                    self._faulty.add(device)
                    self.finishing = False
                self._trouble()
            case holder_events.StepCommitted(step):
                if step > self.history.reported:
                    self.history.reported = step
                    self._settling.progress()
                    self._early.progress()
                    self._refusals.progress()
            case holder_events.SnapshotStable(version, besides):
                self.history.stable = version
                self._write_down()
                self._out.append(holder_instructions.RetainOnly((version, *besides), self.alive))
                if self.phase is HolderPhase.TRAINING:
                    self._let_go()
            case holder_events.GenerationReady() | ReconfigureFailure():
                self._on_answer(event)
            case holder_events.AboutCourse():
                self._on_course(event)
            case _:
                raise InternalError(f"a holder has no rule for {type(event).__name__}")

    # -- signs of trouble --------------------------------------------------------------------

    def _on_member(self, event: holder_events.AboutMember) -> None:
        device = event.device
        if not isinstance(event, holder_events.MemberDied):
            self._there.appeared(device)
            if self.phase is HolderPhase.WAITING:
                self._ask_soon()
            return
        self._there.died(device, certain=event.certain)
        self._leaving.discard(device)
        in_plan = self.history.placed is not None and device in self.history.placed.devices
        self._settling.died(device, in_plan=in_plan)
        if in_plan:
            if self._there.first_report(device):
                self._out.append(holder_instructions.ReportFailure(device))
            self._reason = ReconfigureReason.FAILURE
            self._trouble()
            if event.certain and not event.left:
                self._early.ended(device)
                self._stop_where_a_part_ends_devices()
        if self.phase is HolderPhase.WAITING:
            self._ask_soon()  # hope may have ended

    def _stop_where_a_part_ends_devices(self) -> None:
        part = self._early.part
        if part is not None:
            self.phase = HolderPhase.OVER
            self._out.append(holder_instructions.PartEnds(*part, tuple(self._early.devices)))

    def _on_link_trouble(self, one: str, other: str) -> None:
        self._there.link_broke(one, other)
        placed = self.history.placed
        if placed is None or not {one, other} <= {*placed.devices, self._holder}:
            return
        if {one, other} <= self._there.alive:
            self._settling.link_broke(one, other, self._now)
        self._trouble()

    def _trouble(self) -> None:
        """The generation in force is over, whatever was under way."""
        if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING):
            self._out.append(holder_instructions.StopRounds())
            self.phase = HolderPhase.SETTLING
            self._reason = ReconfigureReason.FAILURE

    # -- asking --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Go on where nothing is to be waited for any more."""
        due = self._now >= self._due
        match self.phase:
            case HolderPhase.STARTING:
                others = set(self.history.parts) - {self._holder}
                are_here = bool(others) and self._there.alive >= others
                if due or (self._due < _NEVER and are_here):
                    self._ask()
            case HolderPhase.SETTLING:
                self._due = max(self._settling.due, self._now)
                if self._now >= self._due:
                    self._ask()
            case HolderPhase.TRAINING:
                placed = self.history.placed
                if placed is not None and self._leaving.intersection(placed.places()):
                    self._drain(ReconfigureReason.LEAVE)
            case HolderPhase.ASKING | HolderPhase.WAITING:
                if due:
                    self._ask()

    def _ask_soon(self) -> None:
        self._due = min(self._due, self._now)

    def _ask(self) -> None:
        useless = self._settling.over()
        self._due = _NEVER
        if useless is not None:
            self.phase = HolderPhase.OVER
            self._out.append(holder_instructions.StopJob(useless))
            return
        self.phase = HolderPhase.ASKING
        self._there.asked()
        history = self.history
        self._number = history.reserve()
        ask = GenerationRequest(
            generation=self._number,
            reason=self._reason,
            units=self._units,
            holder=self._holder,
            alive=self.alive,
            past=history.past(self._there, clips=self._clips, asynchronous=self.asynchronous),
            present=history.placed,
            stable=history.stable,
            without=frozenset(self._leaving | self._settling.without | self._faulty),
            lowered=self.lowered,
        )
        self._write_down()  # else a restart could use these numbers again
        self._out.append(holder_instructions.PrepareGeneration(ask))

    def _write_down(self) -> None:
        took_part = tuple(sorted(self._there.took_part.items()))
        self._out.append(self.history.written_down(took_part))

    # -- answers -------------------------------------------------------------------------------

    def _on_answer(self, event: holder_events.GenerationReady | ReconfigureFailure) -> None:
        if self.phase is not HolderPhase.ASKING or event.number != self._number:
            return  # of a request that was given up
        match event:
            case holder_events.GenerationReady(_, placed, choice):
                if self._there.stand_ready(placed.devices):
                    self._accept(placed, choice)
                else:
                    self._ask_soon()
            case ReconfigureFailure():
                self._on_refusal(event)

    def _on_refusal(self, refused: ReconfigureFailure) -> None:
        leaves = bool(self._leaving)
        verdict = self._refusals.judge(refused, self._there, someone_leaves=leaves)
        match verdict:
            case RetryLater(seconds):
                self._due = min(self._due, self._now + seconds)
            case KeepLeavers(reason):
                self._keep_leavers(reason)
            case AwaitDevices(devices, seconds):
                self.phase = HolderPhase.WAITING
                self._due = _NEVER if seconds is None else self._now + seconds
                self._report_waiting(devices)
            case holder_instructions.StopJob():
                self.phase = HolderPhase.OVER
                self._out.append(verdict)

    def _accept(self, placed: Placement, choice: VersionChoice) -> None:
        self.history.accept(placed)
        oldest_generation = self.history.lineage.eras[0].generation
        self._there.begun(placed.generation, placed.devices, placed.places(), oldest_generation)
        self._early.begun(placed)
        self.phase = HolderPhase.TRAINING
        self._due = _NEVER
        self._waits_for = None
        self._write_down()
        reason, self._reason = self._reason, ReconfigureReason.FAILURE
        self._out.append(holder_instructions.BeginGeneration(placed, choice, reason, self.alive))
        self._let_go()
        if self.finishing and placed.version.step >= self.history.reported:
            self._out.append(holder_instructions.CollectWeights(placed))

    def _report_waiting(self, devices: tuple[str, ...]) -> None:
        if devices != self._waits_for:
            self._waits_for = devices
            self._out.append(holder_instructions.ReportWaiting(devices))

    def _on_leaver(self, device: str) -> None:
        placed = self.history.placed
        if (
            self.phase is HolderPhase.TRAINING
            and placed is not None
            and device not in placed.places()
        ):
            self._out.append(holder_instructions.GrantLeave(device))
        else:
            self._leaving.add(device)  # `_step` drains as soon as that is possible

    def _keep_leavers(self, reason: str) -> None:
        """No plan fits without them: deny their leaves and continue with them."""
        for device in sorted(self._leaving):
            self._out.append(holder_instructions.DenyLeave(device, reason))
        self._leaving.clear()
        self._ask_soon()

    def _let_go(self) -> None:
        """Who has no part any more may leave: nothing depends on it."""
        placed = self.history.placed
        if placed is None or not self.history.is_safe:
            return
        for device in sorted(self._leaving - placed.places().keys()):
            self._leaving.discard(device)
            self._out.append(holder_instructions.GrantLeave(device))

    # -- the undisturbed course ------------------------------------------------------------------

    def _drain(self, reason: ReconfigureReason) -> None:
        if not self.finishing:
            self._reason = reason
            self.phase = HolderPhase.DRAINING
            self._out.append(holder_instructions.DrainRounds())

    def _on_course(self, event: holder_events.AboutCourse) -> None:
        match event:
            case holder_events.ChangeWanted(reason, leaver):
                if leaver is not None:
                    self._on_leaver(leaver)
                elif self.phase is HolderPhase.TRAINING:
                    self._drain(reason)
            case holder_events.RoundsDrained():
                if self.phase is HolderPhase.DRAINING:
                    self._out.append(holder_instructions.StopRounds())
                    self._ask()
            case holder_events.StepsDone():
                self.finishing, placed = True, self.history.placed
                if (
                    self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING)
                    and placed is not None
                ):
                    self.phase = HolderPhase.TRAINING
                    self._out.append(holder_instructions.CollectWeights(placed))
            case holder_events.WeightsHome():
                if self.phase is HolderPhase.TRAINING and self.finishing:
                    self.phase = HolderPhase.OVER
                    self._out.append(holder_instructions.StopJob())
