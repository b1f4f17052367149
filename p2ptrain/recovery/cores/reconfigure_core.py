"""The holder's way to a new generation: state reports, choice of a version, plan, preparation.

    ask all ──► state reports ──► choose ──► roll forward: some apply, ask those ────┐
       ▲                            ▲└───────────────────────────────────────────────┘
       │                            ├──► rebuild: some rebuild lost stages, ask those
       │                            ├──► lost: there is no way
       │                            └──► version: plan ──► prepare ──► all ready: it may begin
       └─── a device died, or was not ready: next generation number ──┘

It keeps nothing beyond the request: the next one begins from the start and finds what was fetched
meanwhile. Pure: its port does what is to be done, and calls the method named with it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.backup_placement import is_covered
from p2ptrain.recovery.choose_version import (
    KnownPast,
    RebuildFirst,
    RollForward,
    StateLost,
    VersionChoice,
    choose_version,
)
from p2ptrain.recovery.cores.liveness import fully_linked
from p2ptrain.recovery.fetch_plan import Fetch, plan_fetches
from p2ptrain.recovery.generation_request import (
    GENERATIONS_PER_REQUEST,
    GenerationRequest,
    PrepareFailed,
    ReconfigureFailure,
    ReconfigureReason,
)
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.state_report import StateEntry, StateKind, StateReport
from p2ptrain.recovery.version import Version

_OF_A_PART = (StateKind.LIVE, StateKind.KEPT, StateKind.REPLICA)

ATTEMPTS_LIMIT = 8
"""Most attempts in a row in which no device was lost."""

COPY_TRIES = 2
"""Attempts that a whole copy (a checkpoint, the first weights) is given: a link may have broken."""


@dataclass(frozen=True, slots=True)
class MakePlan:
    """What a plan is to be made for.

    Attributes:
        devices: that may get work.
        left_out: by device, the peers that it has no link to.
        present: keep this plan as it is, because nothing speaks against it; None = a new plan.
    """

    generation: int
    choice: VersionChoice
    devices: frozenset[str]
    left_out: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)
    lowered: Mapping[str, MemoryBudgets] = dataclasses.field(hash=False)
    present: Placement | None = None


class ChangePort(Protocol):
    """What a request has done."""

    def ask_state(
        self,
        device: str,
        generation: int,
        forward: RollForward | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        """Ask `device`; where they are given, it applies `forward` or does `rebuild` first;
        `state_reported`, or `no_report`."""

    def make_plan(self, make: MakePlan) -> None:
        """In the background; `planned`, or `no_plan`."""

    def prepare(
        self, placed: Placement, wanted: Mapping[str, tuple[Fetch, ...]], *, gathers: bool
    ) -> None:
        """Have each device fetch and build, or only fetch where it `gathers`; `ready`, of each."""

    def generation_ready(self, placed: Placement, choice: VersionChoice) -> None:
        """Every device of the plan is ready."""

    def refused(self, failure: ReconfigureFailure) -> None:
        """There is no way."""


class ChangeCore:
    """See the module.

    Args:
        port: what does the work.
        ask: the request.
        alive: devices that this device sees alive, itself included.
        gathers: where a device of the plan in force is gone, everything goes to the device with
            the data first, and comes from there alone (`--recovery heavy`).

    Attributes:
        generation: the number of the present attempt.
        over: there is a generation, or no way to one; later events change nothing.
    """

    def __init__(
        self,
        ask: GenerationRequest,
        alive: frozenset[str],
        port: ChangePort,
        *,
        gathers: bool = False,
        settings: RecoverySettings = HOME,
    ) -> None:
        self.generation = ask.generation
        self.over = False
        self._ask = ask
        self._port = port
        self._least = settings.rebuild_min_steps
        self._alive = set(ask.alive & alive)
        self._gathers = gathers and ask.reason is ReconfigureReason.FAILURE
        self._gathered: Version | None = None  # all of it is at the device with the data
        self._lowered = dict(ask.lowered)
        self._attempts = 0
        self._last_trouble: PrepareFailed | None = None
        self._spoiled: Counter[Version] = Counter()  # attempts in which a device could not give it
        self._waiting: set[str] = set()
        self._reports: dict[str, StateReport] = {}
        self._rolled_forward: set[str] = set()
        self._rebuilds_ordered = False  # once a request: a device that could not will not
        self._choice: VersionChoice | None = None
        self._gathering = False
        self._placed: Placement | None = None

    def start(self) -> None:
        """Ask every device."""
        self._ask_state()

    def _is_now(self, generation: int) -> bool:
        """Else it is of an attempt that was given up."""
        return not self.over and generation == self.generation

    def state_reported(self, generation: int, report: StateReport) -> None:
        """A device's answer."""
        if self._is_now(generation):
            self._reports[report.device] = self._believed(report)
            self._came(report.device)

    def no_report(self, generation: int, device: str) -> None:
        """A device does not answer, or refuses."""
        if self._is_now(generation):
            self._reports.pop(device, None)
            self._came(device)

    def _believed(self, state_report: StateReport) -> StateReport:
        """Without what that device cannot have: others' updates, or more than were made."""
        ask, past = self._ask, self._ask.past
        placed = () if ask.present is None else ask.present.places()
        had_part = state_report.device in {ask.holder, *past.took_part, *placed}
        most = past.most_step

        def can_be(entry: StateEntry) -> bool:
            if most is not None and entry.version.step > most:
                return False
            return had_part or entry.kind not in _OF_A_PART

        return dataclasses.replace(
            state_report, entries=tuple(one for one in state_report.entries if can_be(one))
        )

    def gone(self, device: str) -> None:
        """A device is dead."""
        if self.over or device not in self._alive:
            return
        self._alive.discard(device)
        self._attempts = 0
        self._reports.pop(device, None)
        if device == self._ask.holder:
            self._refuse("the device with the data stopped answering", again=True)
        elif self._choice is not None:
            self._try_again()  # planned with it, or with what it has
        else:
            self._came(device)

    # -- state reports ---------------------------------------------------------------------

    def _ask_state(self) -> None:
        self._reports.clear()
        self._rolled_forward.clear()
        self._choice = self._placed = None
        self._gathering = False
        self._waiting = set(self._alive)
        for device in sorted(self._alive):
            self._port.ask_state(device, self.generation)

    def _try_again(self) -> None:
        self._attempts += 1
        self.generation += 1
        spent = self.generation - self._ask.generation
        if self._attempts > ATTEMPTS_LIMIT or spent >= GENERATIONS_PER_REQUEST:
            self._give_up(spent)
        else:
            self._ask_state()

    def _give_up(self, spent: int) -> None:
        """Memory, a source, a link may be there soon; what else a device says of itself stays."""
        trouble = self._last_trouble
        why = "" if trouble is None else f": {trouble.reason}"
        passes = (
            trouble is None
            or trouble.is_link
            or trouble.short is not None
            or trouble.source is not None
        )
        reason = f"{spent} attempts to start again failed{why}"
        self._refuse(reason, again=passes, spoiled=spent if passes else 0)

    def _came(self, device: str) -> None:
        if device in self._waiting:
            self._waiting.discard(device)
            if not self._waiting:
                self._decide()

    def _decide(self) -> None:
        holder = self._ask.holder
        if holder not in self._reports:
            self._refuse("the device with the data does not answer", again=True)
            return
        links = {device: state_report.linked for device, state_report in self._reports.items()}
        together, left_out = fully_linked(self._reports, links, holder)
        state_reports = {device: self._reports[device] for device in sorted(together)}
        past = self._ask.past
        # a device that only the holder sees may have what is missing
        unheard = (self._ask.alive - state_reports.keys()) | set(left_out)
        past = dataclasses.replace(past, silent=past.silent | unheard)
        found = self._chosen(state_reports, past)
        match found:
            case RollForward(devices) if self._rolled_forward.issuperset(devices):
                self._try_again()  # they were ordered before, and did not
            case RollForward(devices):
                self._rolled_forward.update(devices)
                self._waiting = set(devices)
                for device in devices:
                    self._port.ask_state(device, self.generation, found)
            case RebuildFirst(todo):
                self._rebuilds_ordered = True
                self._waiting = {one.device for one in todo}
                for one in todo:
                    self._port.ask_state(one.device, self.generation, rebuild=one)
            case StateLost(reason=reason):
                self._refuse(reason, found)
            case VersionChoice():
                able = frozenset(state_reports) - self._ask.without
                present = self._ask.present
                gathers = self._gathers and present and not able.issuperset(present.devices)
                self._choice = self._from_holder(found) if gathers else found
                if gathers and self._gathered != found.version:
                    self._gather(found)
                else:
                    self._plan(self._choice, able, left_out)

    def _chosen(
        self, state_reports: Mapping[str, StateReport], past: KnownPast
    ) -> RollForward | RebuildFirst | VersionChoice | StateLost:
        """A whole copy that could not be read twice is damaged: the next best, if there is one."""
        good = tuple(copy for copy in past.copies if self._spoiled[copy.version] < COPY_TRIES)
        present = None if self._rebuilds_ordered or self._gathers else self._ask.present
        known = dataclasses.replace(past, copies=good)
        found = choose_version(self._ask.units, state_reports, known, present, self._least)
        if isinstance(found, StateLost) and len(good) < len(past.copies):
            return choose_version(self._ask.units, state_reports, past)
        return found

    # -- plan and preparation ----------------------------------------------------------------

    def _gather(self, choice: VersionChoice) -> None:
        holder = self._ask.holder
        placed = self._placed_as((PlacedStage(0, self._ask.units, (holder,)),), choice)
        self._gathering, self._waiting = True, {holder}
        self._port.prepare(placed, plan_fetches(choice, placed.stages), gathers=True)

    def _from_holder(self, choice: VersionChoice) -> VersionChoice:
        """The same, with only the device with the data to take from."""
        holder = self._ask.holder
        if any(holder not in places for places in choice.places):
            return choice
        return dataclasses.replace(choice, places=((holder,),) * self._ask.units)

    def _placed_as(self, stages: tuple[PlacedStage, ...], choice: VersionChoice) -> Placement:
        return Placement(
            generation=self.generation,
            holder=self._ask.holder,
            version=choice.version,
            lineage=self._ask.past.lineage,
            stages=stages,
            stable=self._ask.stable,
        )

    def _plan(
        self,
        choice: VersionChoice,
        devices: frozenset[str],
        left_out: Mapping[str, tuple[str, ...]],
    ) -> None:
        present = self._ask.present
        # a leave that was refused leaves everything as it was
        stays = self._ask.reason in (ReconfigureReason.FAILURE, ReconfigureReason.LEAVE)
        same = (
            present is not None
            and stays
            and not self._lowered
            and not self._ask.without.intersection(present.places())
            and devices.issuperset(present.devices)
            and self._compute_as(present)
        )
        self._port.make_plan(
            MakePlan(
                self.generation,
                choice,
                devices,
                left_out,
                dict(self._lowered),
                present if same else None,
            )
        )

    def _compute_as(self, present: Placement) -> bool:
        """Whether each device does, as when that plan was made: an accelerator may have failed."""
        return all(
            self._reports[device].compute.kind == stage.kind_of(device)
            for stage in present.stages
            for device in stage.devices
        )

    def no_plan(self, generation: int, reason: str) -> None:
        """None fits; `reason` is for the user."""
        if self._is_now(generation):
            self._refuse(reason)

    def planned(self, generation: int, stages: tuple[PlacedStage, ...]) -> None:
        """The planner's answer."""
        choice = self._choice
        if not self._is_now(generation) or choice is None or self._placed is not None:
            return
        placed = self._placed_as(stages, choice)
        placed = dataclasses.replace(placed, keeps=self._is_kept_at_once(placed))
        self._placed = placed
        self._waiting = set(placed.devices)
        self._port.prepare(placed, plan_fetches(choice, placed.stages), gathers=False)

    def _is_kept_at_once(self, placed: Placement) -> bool:
        """Unless a version survives any next death; at first the holder has it."""
        if not placed.protects or placed.version.computed == 0:
            return False
        stable = placed.stable
        if stable is None or not self._ask.past.lineage.is_valid(stable):
            return True
        # only those of the plan: others may go unnoticed
        here = {
            device: self._reports[device] for device in placed.devices if device in self._reports
        }
        return not is_covered(stable, placed.stages, here)

    def ready(self, generation: int, device: str, trouble: PrepareFailed | None) -> None:
        """A device is ready, or says what was in the way."""
        placed, choice = self._placed, self._choice
        ready_for_none = placed is None and not self._gathering
        if not self._is_now(generation) or ready_for_none or device not in self._waiting:
            return
        assert choice is not None
        if trouble is not None:
            if trouble.short is not None:
                self._lowered[device] = trouble.short.has
            self._spoiled[choice.version] += trouble.source is not None
            self._last_trouble = trouble
            self._try_again()
            return
        self._waiting.discard(device)
        if placed is None:
            self._gathered = choice.version
            self.generation += 1
            self._ask_state()
        elif not self._waiting:
            self.over = True
            self._port.generation_ready(placed, choice)

    def _refuse(
        self, reason: str, lost: StateLost | None = None, *, again: bool = False, spoiled: int = 0
    ) -> None:
        self.over = True
        lowered = dict(self._lowered)
        failure = ReconfigureFailure(
            self._ask.generation, reason, lost, again, spoiled=spoiled, lowered=lowered
        )
        self._port.refused(failure)
