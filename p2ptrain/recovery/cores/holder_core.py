"""What a holder does about trouble: wait, have a generation prepared, accept it, begin; repeat.

    STARTING ──► ASKING ──► TRAINING ──► DRAINING ─┐       between rounds: join, leave, drift
                  ▲ ▲          │ trouble           │
                  │ └───── SETTLING ◄──────────────┤       the grace period
                  │                                ▼
                  └──────── WAITING ◄── lost, but not for certain

The holder owns what is true: the history, which generation counts, which step was reported. A
change is final when the journal has it; before that no device is ordered to begin. Pure: call the
method of what happens with the time (seconds of any monotonic clock), and make the calls of the
port that it returns, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Concatenate

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.choose_version import FullSnapshot
from p2ptrain.recovery.cores.holder_port import HolderPhase, HolderPort, P, PortCall
from p2ptrain.recovery.cores.job_history import JobHistory, NotedHistory
from p2ptrain.recovery.cores.liveness import DeviceLiveness, FailureGracePeriod
from p2ptrain.recovery.cores.retry_policy import (
    AwaitDevices,
    EarlyDeaths,
    KeepLeavers,
    RetryLater,
    RetryPolicy,
    StopJob,
)
from p2ptrain.recovery.generation_request import (
    GenerationRequest,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.version import Version

START_SECONDS = 3.0
"""Longest wait of a holder that was started again for the members of its last plan."""

_NEVER = float("inf")


def _event(
    taken_in: Callable[Concatenate[HolderCore, P], None],
) -> Callable[Concatenate[HolderCore, float, P], list[PortCall]]:
    """A method for what happens at a time: what is to be done about it."""

    @wraps(taken_in)
    def happens(
        core: HolderCore, now: float, /, *args: P.args, **kwargs: P.kwargs
    ) -> list[PortCall]:
        core._now = max(now, core._now)
        if core.phase is not HolderPhase.OVER:
            taken_in(core, *args, **kwargs)
            core._step()
        return core._finish()

    return happens


class HolderCore:
    """See the module.

    Args:
        holder: own id.
        port: what does the work.
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
        port: HolderPort,
        units: int,
        reported: int,
        *,
        journal: NotedHistory | None = None,
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
        self._port = port
        self._units = units
        self._clips = clips
        # until it is seen, a device with a part before a restart may still have it
        took_part = dict(journal.took_part) if journal else {}
        self._there = DeviceLiveness(holder, took_part, self.history.parts)
        self._settling = FailureGracePeriod(holder, settings)
        self._refusals = RetryPolicy()
        self._early = EarlyDeaths()
        self._leaving: set[str] = set()
        self._asked_without_leavers = False  # the newest request
        self._faulty = set(faulty)
        self._reason = (
            ReconfigureReason.START if self.history.placed is None else ReconfigureReason.FAILURE
        )
        self._number = 0
        self._due = _NEVER  # of the present phase
        self._waits_for: tuple[str, ...] | None = None  # as reported last
        self._now = float("-inf")
        self._out: list[PortCall] = []

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

    def start(self, now: float) -> list[PortCall]:
        """Begin; a holder that was started again gives its members a moment to be found."""
        self._now = max(now, self._now)
        self._due = now + START_SECONDS if self.history.placed is not None else now
        self._step()
        return self._finish()

    def _finish(self) -> list[PortCall]:
        out, self._out = self._out, []
        return out

    @_event
    def tick(self) -> None:
        """Do what is due."""

    # -- signs of trouble --------------------------------------------------------------------

    @_event
    def member_appeared(self, device: str) -> None:
        """A device is alive, perhaps again; the holder has a link to it."""
        self._there.appeared(device)
        if self.phase is HolderPhase.WAITING:
            self._ask_soon()

    @_event
    def member_died(self, device: str, *, certain: bool, left: bool = False) -> None:
        """A device is dead.

        Args:
            certain: its process ended, so what it had is gone; else it may only be out of reach.
            left: it said so before.
        """
        self._there.died(device, certain=certain)
        self._leaving.discard(device)
        in_plan = self.history.placed is not None and device in self.history.placed.devices
        self._settling.died(device, in_plan=in_plan)
        if in_plan:
            if self._there.first_report(device):
                self._out.append(partial(self._port.report_failure, device))
            self._reason = ReconfigureReason.FAILURE
            self._trouble()
            if certain and not left:
                self._early.ended(device)
                part = self._early.part
                if part is not None:
                    self.phase = HolderPhase.OVER
                    self._out.append(
                        partial(self._port.end_part, *part, tuple(self._early.devices))
                    )
        if self.phase is HolderPhase.WAITING:
            self._ask_soon()  # hope may have ended

    @_event
    def link_broke(self, one: str, other: str) -> None:
        """The link between two devices broke; what was queued on it is lost."""
        self._there.link_broke(one, other)
        placed = self.history.placed
        if placed is None or not {one, other} <= {*placed.devices, self._holder}:
            return
        if {one, other} <= self._there.alive:
            self._settling.link_broke(one, other, self._now)
        self._trouble()

    @_event
    def link_back(self, one: str, other: str) -> None:
        """The link between two devices is there again."""
        self._settling.link_back(one, other)

    @_event
    def out_of_memory(self, device: str, memory: MemoryBudgets) -> None:
        """A device of the plan ran out of memory; `memory`: what it has, as far as is known."""
        known = self._refusals.lowered.get(device, memory)  # perhaps of the other memory
        self._refusals.lowered[device] = memory.at_most(known)
        self._trouble()

    @_event
    def round_interrupted(self, reason: str) -> None:
        """A round cannot go on: something was out of reach; signs of the cause may follow."""
        if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING):
            self._settling.broke_off(reason, self._now)
            self._trouble()

    @_event
    def round_stalled(self, devices: frozenset[str] = frozenset()) -> None:
        """Nothing has moved for a long time; these had not finished what was ordered."""
        if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING):
            self._settling.stood_still(devices)
            self._trouble()

    @_event
    def sends_wrong(self, device: str | None, cleared: frozenset[str] = frozenset()) -> None:
        """A device sends what it should not, or nothing: it gets no work any more in this job.

        Args:
            device: None = no device is to blame, and a plan is to be made at once all the same.
            cleared: devices that were thought so and are not.
        """
        self._faulty -= cleared
        if device is not None:
            self._faulty.add(device)
            self.finishing = False
        self._trouble()

    def _trouble(self) -> None:
        """The generation in force is over, whatever was under way."""
        if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING):
            self._out.append(self._port.stop_rounds)
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
            self._out.append(partial(self._port.stop_job, useless))
            return
        self.phase = HolderPhase.ASKING
        self._there.asked()
        history = self.history
        self._number = history.reserve()
        self._asked_without_leavers = bool(self._leaving)
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
        self._out.append(partial(self._port.prepare, ask))

    def _write_down(self) -> None:
        took_part = tuple(sorted(self._there.took_part.items()))
        self._out.append(partial(self._port.write_down, self.history.written_down(took_part)))

    # -- answers -------------------------------------------------------------------------------

    @_event
    def generation_ready(self, number: int, placed: Placement) -> None:
        """What came of request `number`: all devices of `placed` are ready."""
        if self.phase is not HolderPhase.ASKING or number != self._number:
            return  # of a request that was given up
        if self._there.stand_ready(placed.devices):
            self._accept(placed)
        else:
            self._ask_soon()

    @_event
    def refused(self, refused: ReconfigureFailure) -> None:
        """The same: there is no way."""
        if self.phase is not HolderPhase.ASKING or refused.number != self._number:
            return
        # one that has ended since may be back: without it there is another question
        leaves = bool(self._leaving) or self._asked_without_leavers
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
            case StopJob(reason, lost):
                self.phase = HolderPhase.OVER
                self._out.append(partial(self._port.stop_job, reason, lost))

    def _accept(self, placed: Placement) -> None:
        self.history.accept(placed)
        oldest_generation = self.history.lineage.eras[0].generation
        self._there.begun(placed.generation, placed.devices, placed.places(), oldest_generation)
        self._early.begun(placed)
        self.phase = HolderPhase.TRAINING
        self._due = _NEVER
        self._waits_for = None
        self._write_down()
        reason, self._reason = self._reason, ReconfigureReason.FAILURE
        self._out.append(partial(self._port.begin, placed, reason, self.alive))
        self._let_go()
        if self.finishing and placed.version.step >= self.history.reported:
            self._out.append(partial(self._port.collect_weights, placed))

    def _report_waiting(self, devices: tuple[str, ...]) -> None:
        if devices != self._waits_for:
            self._waits_for = devices
            self._out.append(partial(self._port.report_waiting, devices))

    def _on_leaver(self, device: str) -> None:
        placed = self.history.placed
        if (
            self.phase is HolderPhase.TRAINING
            and placed is not None
            and device not in placed.places()
        ):
            self._out.append(partial(self._port.grant_leave, device))
        else:
            self._leaving.add(device)  # `_step` drains as soon as that is possible

    def _keep_leavers(self, reason: str) -> None:
        """No plan fits without them: deny their leaves and continue with them."""
        for device in sorted(self._leaving):
            self._out.append(partial(self._port.deny_leave, device, reason))
        self._leaving.clear()
        self._ask_soon()

    def _let_go(self) -> None:
        """Who has no part any more may leave: nothing depends on it."""
        placed = self.history.placed
        if placed is None or not self.history.is_safe:
            return
        for device in sorted(self._leaving - placed.places().keys()):
            self._leaving.discard(device)
            self._out.append(partial(self._port.grant_leave, device))

    # -- the undisturbed course ------------------------------------------------------------------

    def _drain(self, reason: ReconfigureReason) -> None:
        if not self.finishing:
            self._reason = reason
            self.phase = HolderPhase.DRAINING
            self._out.append(self._port.drain_rounds)

    @_event
    def step_committed(self, step: int) -> None:
        """`step` updates count: decided, written down and reported."""
        if step > self.history.reported:
            self.history.reported = step
            self._settling.progress()
            self._early.progress()
            self._refusals.progress()

    @_event
    def snapshot_stable(self, version: Version, besides: tuple[Version, ...] = ()) -> None:
        """Every copy that `version` needs to be whole without any one device is acknowledged.

        Args:
            besides: versions that a device still reads.
        """
        self.history.stable = version
        self._write_down()
        self._out.append(partial(self._port.retain_only, (version, *besides), self.alive))
        if self.phase is HolderPhase.TRAINING:
            self._let_go()

    @_event
    def change_wanted(self, reason: ReconfigureReason, leaver: str | None = None) -> None:
        """A change that can wait for the border of a round: join, leave or drift."""
        if leaver is not None:
            self._on_leaver(leaver)
        elif self.phase is HolderPhase.TRAINING:
            self._drain(reason)

    @_event
    def rounds_drained(self) -> None:
        """The last round ordered is committed; none is under way."""
        if self.phase is HolderPhase.DRAINING:
            self._out.append(self._port.stop_rounds)
            self._ask()

    @_event
    def steps_done(self) -> None:
        """The last step of the job is committed: the weights come home."""
        self.finishing, placed = True, self.history.placed
        if self.phase in (HolderPhase.TRAINING, HolderPhase.DRAINING) and placed is not None:
            self.phase = HolderPhase.TRAINING
            self._out.append(partial(self._port.collect_weights, placed))

    @_event
    def weights_home(self) -> None:
        """The weights are home and written."""
        if self.phase is HolderPhase.TRAINING and self.finishing:
            self.phase = HolderPhase.OVER
            self._out.append(self._port.stop_job)
