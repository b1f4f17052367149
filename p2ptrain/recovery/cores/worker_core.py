"""One device's part in one job's recovery: its holder, what it has, when it may continue.

    IDLE ──► PREPARING ──► READY ──► RUNNING ──► STOPPING ──► STOPPED ──► PREPARING ──► ...
             prepare       built     begin       inventory    flushed     prepare
                                        └─ holder gone ─► STOPPING ─► PARKED ─► inventory

What it trains (LIVE) stays until the next generation begins: until then others may read from it,
and training may continue from it. The holder alone commands: the device that asked first, as long
as there is a job. A generation to prepare must be newer than all before, an order must name the
generation that runs.

This class is a pure core: no clock, no task, no tensor. Feed it events, carry out what it returns,
in that order. The shell's `Stopped` is the truth about what is trained here.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from p2ptrain.errors import InternalError
from p2ptrain.recovery.cores import worker_events, worker_instructions
from p2ptrain.recovery.cores.worker_state import HeldSnapshots, PartnerLinks, TrainedStages
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.state_report import StateEntry, StateKind
from p2ptrain.recovery.version import Version

ORDERS_REMEMBERED = 64
"""Far more than are ever under way; in asynchronous training nothing else ends one here."""


class WorkerPhase(StrEnum):
    """What this device does for the job."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    PARKED = "parked"


class WorkerCore:
    """See the module.

    Args:
        device: own id.

    Attributes:
        phase: what it does.
        generation: of the newest command obeyed; only rises.
        running: the generation that its LIVE holdings are of, also after it was stopped.
        prepared: the generation that it prepares or is ready for.
        refused: stale commands so far.
    """

    def __init__(self, device: str) -> None:
        self.phase = WorkerPhase.IDLE
        self.generation = 0
        self.running: Placement | None = None
        self.prepared: Placement | None = None
        self.refused = 0
        self._device = device
        self._holder: str | None = None
        self._trained = TrainedStages()
        self._copies = HeldSnapshots()
        # answered once everything stands still
        self._asked: worker_events.StateReportAsked | None = None
        self._rebuilds = False  # a lost stage, before that answer
        self._preparing: worker_events.PrepareAsked | None = None
        self._park = False  # the stop under way is because the holder is gone
        self._abandoned: Placement | None = None  # whose preparation was given up last
        self._left_out = False  # it is because a generation began without this device
        self._links = PartnerLinks(device)
        self._keeps: dict[int, bool] = {}  # by step, of orders not committed
        self._out: list[worker_instructions.DeviceInstruction] = []

    @property
    def holder(self) -> str | None:
        """Whose job this is; None where there is none."""
        return self._holder

    def refusal(self, peer: str, generation: int) -> str | None:
        """The fence: why a command is refused; None = it may be obeyed."""
        if self._holder not in (None, peer):
            return "that job is another device's"
        if generation < self.generation:
            return (
                f"generation {generation} is over: generation {self.generation} was asked for since"
            )
        return None

    @property
    def holdings(self) -> tuple[StateEntry, ...]:
        """What is here, as far as is known without stopping."""
        return (*self._trained.holdings, *self._copies.holdings)

    def handle(
        self, event: worker_events.DeviceEvent
    ) -> list[worker_instructions.DeviceInstruction]:
        """Take in one event."""
        match event:
            case worker_events.StateReportAsked():
                self._on_inventory(event)
            case worker_events.RebuildDone():
                self._on_rebuilt(event)
            case worker_events.GenerationStopped(held):
                self._on_stopped(held)
            case worker_events.PrepareAsked():
                self._on_prepare(event)
            case worker_events.AboutPreparation():
                self._on_preparation(event)
            case worker_events.BeginReceived(peer, generation):
                self._on_begin(peer, generation)
            case worker_events.RoundOrdered():
                self._on_order(event)
            case worker_events.AboutSeat():
                self._on_seat(event)
            case worker_events.CommitReceived():
                self._on_commit(event)
            case worker_events.AboutCopies():
                self._on_copies(event)
            case worker_events.SnapshotDamaged(holding):
                self._copies.discard(holding)
            case worker_events.HolderChanged(state):
                self._on_holder(state)
            case worker_events.AboutLinks():
                self._on_link(event)
            case _:
                raise InternalError(f"a device has no rule for {type(event).__name__}")
        out, self._out = self._out, []
        return out

    # -- taking stock ----------------------------------------------------------------------

    def _on_inventory(self, asked: worker_events.StateReportAsked) -> None:
        if not self._obeys(asked, asked.generation):
            return
        self._abandon_preparation()
        if self._asked is not None:
            self._refuse(self._asked, "asked again since")
        if self._rebuilds:
            self._rebuilds = False
            self._out.append(worker_instructions.CancelRebuild())
        self._asked = asked
        self._park = False
        if self.phase is WorkerPhase.RUNNING:
            self._stop()
        elif self.phase is not WorkerPhase.STOPPING:
            self._apply_or_answer()

    def _obeys(self, asked: worker_events.HolderAsks, generation: int) -> bool:
        why = self.refusal(asked.peer, generation)
        if why is None and self.running is not None and generation <= self.running.generation:
            why = f"generation {generation} is over: generation {self.running.generation} has begun"
        if why is None and self.prepared is not None and generation <= self.prepared.generation:
            why = f"generation {generation} is prepared already"
        if why is not None:
            self._refuse(asked, why)
            return False
        self._holder = asked.peer
        self.generation = generation
        return True

    def _refuse(self, asked: worker_events.HolderAsks, reason: str) -> None:
        self.refused += 1
        self._out.append(worker_instructions.RefuseCommand(asked.request, asked.peer, reason))

    def _stop(self) -> None:
        assert self.running is not None
        self.phase = WorkerPhase.STOPPING
        self._keeps.clear()
        self._out.append(worker_instructions.StopStages(self.running.generation))

    def _on_stopped(self, held: tuple[StateEntry, ...]) -> None:
        if self.phase is not WorkerPhase.STOPPING:
            return
        self.phase = WorkerPhase.STOPPED
        self._trained.are(held)
        if self._left_out:
            self._left_out = False
            self._free_live()
        if self._asked is not None:
            self._apply_or_answer()
        elif self._park:
            self._rest()

    def _apply_or_answer(self) -> None:
        """Answer, unless gradients must be applied or a lost stage must be rebuilt first."""
        asked = self._asked
        if asked is None or self._trained.are_catching_up or self._rebuilds:
            return
        self.phase = WorkerPhase.STOPPED
        if asked.apply is not None and self._trained.are_ready_for(asked.apply):
            self._trained.catch_up(asked.apply)
            generation = asked.apply.computed
            self._out.append(
                worker_instructions.ApplyUpdate(
                    generation, asked.apply, asked.coefficient, keep=False
                )
            )
            return
        if asked.rebuild is not None:
            self._rebuilds = True
            self._out.append(worker_instructions.RebuildStage(asked.request, asked.rebuild))
            return
        self._asked = None
        self._out.append(
            worker_instructions.AnswerStateReport(
                asked.request, asked.peer, self.generation, self.holdings
            )
        )

    def _on_rebuilt(self, rebuilt: worker_events.RebuildDone) -> None:
        asked, what = self._asked, rebuilt.what
        if asked is None or not self._rebuilds or asked.request != rebuilt.request:
            return  # no peer waits for it
        self._rebuilds = False
        if rebuilt.is_here:
            for holding in what.made:
                self._copies.put(holding)
        self._asked = dataclasses.replace(asked, rebuild=None)
        self._apply_or_answer()

    # -- preparing -------------------------------------------------------------------------

    def _on_prepare(self, asked: worker_events.PrepareAsked) -> None:
        placed = asked.placed
        if placed.holder != asked.peer:
            self._refuse(asked, "that plan is another device's")
            return
        if not self._obeys(asked, placed.generation):
            return
        if self.phase in (WorkerPhase.RUNNING, WorkerPhase.STOPPING) or self._asked is not None:
            self._refuse(asked, "this device has not stopped: ask for its inventory first")
            return
        self._abandon_preparation()
        self.phase = WorkerPhase.PREPARING
        self.prepared, self._preparing = placed, asked
        self._out += self._copies.drop({StateKind.FETCHED}, but=(placed.version,))
        self._out.append(
            worker_instructions.FetchParts(placed.generation, placed.version, asked.fetches)
        )

    def _on_preparation(self, event: worker_events.AboutPreparation) -> None:
        asked, placed = self._preparing, self.prepared
        if asked is None or placed is None or event.generation != placed.generation:
            return  # of a preparation that was abandoned
        match event:
            case worker_events.PartFetched(_, first, end, version):
                if version == placed.version:
                    self._copies.put(StateEntry(first, end, version, StateKind.FETCHED))
            case worker_events.Fetched(generation):
                self._out.append(worker_instructions.BuildStages(generation))
            case worker_events.Built(generation):
                self.phase = WorkerPhase.READY
                self._preparing = None
                self._out.append(
                    worker_instructions.AnswerReady(asked.request, asked.peer, generation)
                )
            case worker_events.PrepareFailed(generation):
                self.phase = WorkerPhase.STOPPED
                self.prepared = self._preparing = None
                self._out.append(
                    worker_instructions.AnswerReady(asked.request, asked.peer, generation, event)
                )

    def _abandon_preparation(self) -> None:
        if self.prepared is None:
            return
        if self._preparing is not None:
            self._refuse(self._preparing, "asked again since")
        self._out.append(worker_instructions.CancelPrepare(self.prepared.generation))
        self._abandoned = self.prepared
        self.prepared = self._preparing = None
        self.phase = WorkerPhase.STOPPED

    # -- beginning -------------------------------------------------------------------------

    def _on_begin(self, peer: str, generation: int) -> None:
        begun = self.running is not None and generation <= self.running.generation
        if begun or generation < self.generation or peer != self._holder:
            self.refused += not begun
            return
        if self.prepared is not None and self.prepared.generation == generation:
            if self.phase is WorkerPhase.READY:
                self._begin(self.prepared)
        elif self._abandoned is not None and self._abandoned.gives_part(self._device, generation):
            # the holder believes that it still stands: all of it would wait for this device
            self._out += [
                worker_instructions.ReportLink(peer, generation, peer, back)
                for back in (False, True)
            ]
        else:
            self._leave_generation(generation)

    def _begin(self, placed: Placement) -> None:
        self.running, self.prepared = placed, None
        self._links.begin()
        self.phase = WorkerPhase.RUNNING
        self._copies.begin()
        self._trained.begin(placed.ranges_of(self._device), placed.version)
        self._out.append(worker_instructions.StartStages(placed))
        self._out += self._copies.drop({StateKind.FETCHED})
        # copies that never came to count; the one to go back to and the one we begin with stay
        self._out += self._copies.drop(
            {StateKind.KEPT, StateKind.REPLICA}, but=(placed.stable, placed.version)
        )
        if placed.keeps:
            self._out.append(worker_instructions.TakeSnapshot(placed.generation, placed.version))

    def _leave_generation(self, generation: int) -> None:
        """A generation began without this device: what it trained is of no use any more."""
        self._abandon_preparation()
        self.generation = max(self.generation, generation)
        self._out += self._copies.drop({StateKind.FETCHED})
        if self.phase is WorkerPhase.RUNNING:
            self._stop()
        self._left_out = self.phase is WorkerPhase.STOPPING
        if not self._left_out:
            self._free_live()

    def _free_live(self) -> None:
        if self._trained.holdings:
            self._out.append(worker_instructions.DropState(self._trained.holdings))
        self._trained.clear()
        self.phase = WorkerPhase.IDLE

    # -- rounds ----------------------------------------------------------------------------

    def _on_order(self, order: worker_events.RoundOrdered) -> None:
        prepared = self.prepared
        if prepared is not None and order.generation == prepared.generation:
            self._on_begin(order.peer, order.generation)  # it overtook `generation.begin`
        if self._is_of_running(order.peer, order.generation):
            self._keeps[order.step] = order.keep
            self._keeps.pop(order.step - ORDERS_REMEMBERED, None)
            if order.keep and order.stay is not None:
                self._out += self._copies.drop({StateKind.KEPT, StateKind.REPLICA}, but=order.stay)
            if order.keep and not order.offer:
                self._copies.keep_to_itself(Version(order.step + 1, order.generation))
            self._out.append(
                worker_instructions.QueueRound(order.generation, order.step, order.keep)
            )

    def _is_of_running(self, peer: str, generation: int) -> bool:
        running = self.running
        good = (
            self.phase is WorkerPhase.RUNNING
            and running is not None
            and (peer, generation) == (running.holder, running.generation)
        )
        self.refused += not good
        return good

    def _on_commit(self, commit: worker_events.CommitReceived) -> None:
        if not self._is_of_running(commit.peer, commit.generation):
            return
        version = Version(commit.step + 1, commit.generation)
        if not self._trained.commit(version):
            self.refused += 1
            return
        keep = self._keeps.pop(commit.step, False)
        self._out.append(
            worker_instructions.ApplyUpdate(commit.generation, version, commit.coefficient, keep)
        )

    def _on_seat(self, event: worker_events.AboutSeat) -> None:
        running, is_running = self.running, self.phase is WorkerPhase.RUNNING
        if running is None or event.generation != running.generation:
            return
        is_known = self._trained.note(event, is_running=is_running)
        if is_known and not is_running and self.phase is not WorkerPhase.STOPPING:
            self._apply_or_answer()

    # -- copies ----------------------------------------------------------------------------

    def _on_copies(self, event: worker_events.AboutCopies) -> None:
        if self._holder is None:
            return  # the job is over: what was under way has no place any more
        match event:
            case worker_events.SnapshotTaken(first, end, version):
                self._copies.put(StateEntry(first, end, version, StateKind.KEPT))
                if self.phase is WorkerPhase.RUNNING and self.running is not None:
                    self._out += self._copies.offer(self.running, first, end, version)
            case worker_events.OfferReceived(peer, generation, first, end, version):
                # a device notified late of a generation is only prepared for it
                plan = self.running if self.phase is WorkerPhase.RUNNING else self.prepared
                if plan and plan.generation == generation and (first, end) in plan.ranges_of(peer):
                    self._out.append(
                        worker_instructions.CollectSnapshot(peer, generation, first, end, version)
                    )
            case worker_events.SnapshotCollected(generation, first, end, version):
                self._copies.put(StateEntry(first, end, version, StateKind.REPLICA))
                self._report_snapshot(generation, first, end, version)
            case worker_events.SnapshotFailed(generation, first, end, version, reason):
                self._report_snapshot(generation, first, end, version, reason)
            case worker_events.BackupPeerAssigned(peer, generation, first, end, version, keeper):
                if self._is_of_running(peer, generation) and self.running is not None:
                    units = (first, end)
                    self._out += self._copies.offer_to(keeper, self.running, *units, version)
            case worker_events.RetainReceived(peer, versions):
                if peer == self._holder and versions:
                    self._out += self._copies.keep_only(versions)

    def _report_snapshot(
        self, generation: int, first: int, end: int, version: Version, failed: str | None = None
    ) -> None:
        for plan in (self.running, self.prepared):  # notified late: snapshots come early
            if plan is not None and plan.generation == generation:
                report = worker_instructions.ReportSnapshot(
                    plan.holder, generation, first, end, version, failed
                )
                self._out.append(report)

    # -- trouble ---------------------------------------------------------------------------

    def _on_holder(self, state: worker_events.HolderState) -> None:
        parked = self._park or self.phase is WorkerPhase.PARKED
        if state is worker_events.HolderState.ENDED or (
            state is worker_events.HolderState.LEFT and not parked
        ):
            self._forget()
        elif parked:
            pass  # another process of that device came and went: the job's own is still missing
        elif self.phase is WorkerPhase.RUNNING:
            self._park = True
            self._stop()
        elif self.phase is WorkerPhase.STOPPING:
            self._park = True
        elif self._holder is not None:
            self._abandon_preparation()
            self._rest()

    def _forget(self) -> None:
        """The job is over; only the number of the newest generation stays."""
        self._abandon_preparation()
        self.phase = WorkerPhase.IDLE
        self.running = self._asked = self._holder = None
        self._rebuilds = False
        self._trained.clear()
        self._copies.clear()
        self._out.append(worker_instructions.ReleaseJob())

    def _rest(self) -> None:
        """Keep everything for the holder's next process; where there is nothing, await nothing."""
        self._park = False
        if not self.holdings:
            self.phase = WorkerPhase.IDLE
        elif self._holder is not None:
            self.phase = WorkerPhase.PARKED
            self._out.append(worker_instructions.ReportOrphaned(self._holder))

    def _on_link(self, event: worker_events.AboutLinks) -> None:
        if self.phase is WorkerPhase.RUNNING and self.running is not None:
            is_end = isinstance(event, worker_events.LinkEnded)
            note = self._links.ended if is_end else self._links.started
            self._out += note(self.running, event.peer)
