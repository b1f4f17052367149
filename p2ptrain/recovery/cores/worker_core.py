"""One device's part in one job's recovery: its holder, what it has, when it may continue.

    IDLE ──► PREPARING ──► READY ──► RUNNING ──► STOPPING ──► STOPPED ──► PREPARING ──► ...
             prepare       built     begin       state report    flushed     prepare
                                        └─ holder gone ─► STOPPING ─► PARKED ─► state report

What it trains (LIVE) stays until the next generation begins: until then others may read from it,
and training may continue from it. The holder alone commands: the device that asked first, as long
as there is a job. A generation to prepare must be newer than all before, an order must name the
generation that runs.

This class is a pure core: no clock, no task, no tensor. Its methods say what happens; it has its
port do what follows, in that order. What is here it asks its port.
"""

from __future__ import annotations

import dataclasses

from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.cores.worker_port import (
    HolderState,
    StateReportAsked,
    WorkerPhase,
    WorkerPort,
)
from p2ptrain.recovery.cores.worker_state import HeldSnapshots, PartnerLinks
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import PrepareFailed
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.state_report import StageCopy, StateEntry, StateKind
from p2ptrain.recovery.version import Version

ORDERS_REMEMBERED = 64
"""Far more than are ever under way; in asynchronous training nothing else ends one here."""


class WorkerCore:
    """See the module.

    Args:
        device: own id.
        port: what does the work.

    Attributes:
        phase: what it does.
        generation: of the newest command obeyed; only rises.
        running: the generation that its LIVE entries are of, also after it was stopped.
        prepared: the generation that it prepares or is ready for.
        refused: stale commands so far.
        holder: id of the device whose job this is; None where there is none.
    """

    def __init__(self, device: str, port: WorkerPort) -> None:
        self.phase = WorkerPhase.IDLE
        self.generation = 0
        self.running: Placement | None = None
        self.prepared: Placement | None = None
        self.refused = 0
        self._device = device
        self._port = port
        self.holder: str | None = None
        self._committed: Version | None = None  # the newest, to this device
        self._catching_up: set[int] = set()  # stages whose update others have applied already
        self._copies = HeldSnapshots(port)
        # answered once everything stands still
        self._asked: StateReportAsked | None = None
        self._rebuilds = False  # a lost stage, before that answer
        self._preparing: tuple[int, str] | None = None  # request and device that wait for it
        self._orphan = False  # the stop under way is because the holder is gone
        self._abandoned: Placement | None = None  # whose preparation was given up last
        self._left_out = False  # it is because a generation began without this device
        self._links = PartnerLinks(device, port)
        self._keeps: dict[int, bool] = {}  # by step, of orders not committed

    def refusal(self, peer: str, generation: int) -> str | None:
        """The fence: why a command is refused; None = it may be obeyed."""
        if self.holder not in (None, peer):
            return "that job is another device's"
        if generation < self.generation:
            return (
                f"generation {generation} is over: generation {self.generation} was asked for since"
            )
        return None

    @property
    def entries(self) -> tuple[StateEntry, ...]:
        """What is here, as far as is known without stopping."""
        is_over = self.running is None  # what was trained may be stopping still
        here = self._port.entries()
        return tuple(e for e in here if not is_over or e.kind is not StateKind.LIVE)

    @property
    def _trained(self) -> tuple[StateEntry, ...]:
        return tuple(entry for entry in self.entries if entry.kind is StateKind.LIVE)

    def _enter(self, phase: WorkerPhase) -> None:
        self.phase = phase
        self._port.phase_changed()

    # -- state reports ---------------------------------------------------------------------

    def state_asked(self, asked: StateReportAsked) -> None:
        """This device is to stop, and to say what is here."""
        if not self._obeys(asked.request, asked.peer, asked.generation):
            return
        self._abandon_preparation()
        if self._asked is not None:
            self._refuse(self._asked.request, self._asked.peer, "asked again since")
        if self._rebuilds:
            self._rebuilds = False
            self._port.cancel_rebuild()
        self._asked = asked
        self._orphan = False
        if self.phase is WorkerPhase.RUNNING:
            self._stop()
        elif self.phase is not WorkerPhase.STOPPING:
            self._apply_or_answer()

    def _obeys(self, request: int, peer: str, generation: int) -> bool:
        why = self.refusal(peer, generation)
        if why is None and self.running is not None and generation <= self.running.generation:
            why = f"generation {generation} is over: generation {self.running.generation} has begun"
        if why is None and self.prepared is not None and generation <= self.prepared.generation:
            why = f"generation {generation} is prepared already"
        if why is not None:
            self._refuse(request, peer, why)
            return False
        self.holder = peer
        self.generation = generation
        return True

    def _refuse(self, request: int, peer: str, reason: str) -> None:
        self.refused += 1
        self._port.refuse(request, peer, reason)

    def _stop(self) -> None:
        self._enter(WorkerPhase.STOPPING)
        self._keeps.clear()
        self._port.stop_stages()

    def stopped(self) -> None:
        """Nothing of the old generation runs any more, in no thread."""
        if self.phase is not WorkerPhase.STOPPING:
            return
        self._enter(WorkerPhase.STOPPED)
        if self._left_out:
            self._left_out = False
            self._free_live()
        if self._asked is not None:
            self._apply_or_answer()
        elif self._orphan:
            self._rest()

    def _apply_or_answer(self) -> None:
        """Answer, unless gradients must be applied or a lost stage must be rebuilt first."""
        asked = self._asked
        if asked is None or self._catching_up or self._rebuilds:
            return
        self._enter(WorkerPhase.STOPPED)
        version = asked.apply
        ready = {one.first for one in self._trained if one.ready == version}
        if version is not None and ready:
            self._catching_up = ready
            self._port.apply_update(version.computed, version, asked.coefficient, keep=False)
        elif asked.rebuild is not None:
            self._rebuilds = True
            self._port.rebuild_stage(asked.request, asked.rebuild)
        else:
            self._asked = None
            self._port.answer_state(asked.request, asked.peer, self.entries)

    def rebuilt(self, request: int) -> None:
        """What was asked for with that request is here now, or could not be made."""
        asked = self._asked
        if asked is None or not self._rebuilds or asked.request != request:
            return  # no peer waits for it
        self._rebuilds = False
        self._asked = dataclasses.replace(asked, rebuild=None)
        self._apply_or_answer()

    # -- preparing -------------------------------------------------------------------------

    def prepare_asked(
        self, request: int, peer: str, placed: Placement, fetches: tuple[Fetch, ...]
    ) -> None:
        """The holder wants this device's part of `placed` fetched and built."""
        if placed.holder != peer:
            self._refuse(request, peer, "that plan is another device's")
            return
        if not self._obeys(request, peer, placed.generation):
            return
        if self.phase in (WorkerPhase.RUNNING, WorkerPhase.STOPPING) or self._asked is not None:
            self._refuse(
                request, peer, "this device has not stopped: ask for its state report first"
            )
            return
        self._abandon_preparation()
        self.prepared, self._preparing = placed, (request, peer)
        self._enter(WorkerPhase.PREPARING)
        self._copies.drop({StateKind.FETCHED}, but=(placed.version,))
        self._port.make_ready(placed.generation, placed.version, fetches)

    def _prepares(self, generation: int) -> bool:
        """Else it is of a preparation that was abandoned."""
        prepared = None if self.prepared is None else self.prepared.generation
        return self._preparing is not None and prepared == generation

    def built(self, generation: int) -> None:
        """All has arrived, and the stages stand."""
        if self._prepares(generation):
            self._enter(WorkerPhase.READY)
            self._answer_ready(None)

    def prepare_failed(self, generation: int, trouble: PrepareFailed) -> None:
        """They will not."""
        if self._prepares(generation):
            self.prepared = None
            self._enter(WorkerPhase.STOPPED)
            self._answer_ready(trouble)

    def _answer_ready(self, trouble: PrepareFailed | None) -> None:
        assert self._preparing is not None
        answer, self._preparing = self._preparing, None
        self._port.answer_ready(*answer, trouble)

    def _abandon_preparation(self) -> None:
        if self.prepared is None:
            return
        if self._preparing is not None:
            self._refuse(*self._preparing, "asked again since")
        self._port.cancel_prepare()
        self._abandoned = self.prepared
        self.prepared = self._preparing = None
        self._enter(WorkerPhase.STOPPED)

    # -- beginning -------------------------------------------------------------------------

    def begin(self, peer: str, generation: int) -> None:
        """The holder says that `generation` is in force."""
        begun = self.running is not None and generation <= self.running.generation
        if begun or generation < self.generation or peer != self.holder:
            self.refused += not begun
            return
        if self.prepared is not None and self.prepared.generation == generation:
            if self.phase is WorkerPhase.READY:
                self._begin(self.prepared)
        elif self._abandoned is not None and self._abandoned.gives_part(self._device, generation):
            self._say_stopped(peer, generation)
        else:
            self._leave_generation(generation)

    def _say_stopped(self, holder: str, generation: int) -> None:
        """It may believe that this device works on it: all of it would wait for this device."""
        for back in (False, True):
            self._port.report_link(holder, generation, holder, back=back)

    def _begin(self, placed: Placement) -> None:
        self.running, self.prepared = placed, None
        self._links.begin()
        self._copies.begin()
        self._catching_up.clear()
        self._enter(WorkerPhase.RUNNING)
        self._port.start_stages(placed)
        self._copies.drop({StateKind.FETCHED})
        # copies that never came to count; the one to go back to and the one we begin with stay
        self._copies.drop({StateKind.KEPT, StateKind.REPLICA}, but=(placed.stable, placed.version))
        if placed.keeps:
            self._port.copy_stages(placed.version)

    def _leave_generation(self, generation: int) -> None:
        """A generation began without this device: what it trained is of no use any more."""
        self._abandon_preparation()
        self.generation = max(self.generation, generation)
        self._copies.drop({StateKind.FETCHED})
        self._left_out = self.phase in (WorkerPhase.RUNNING, WorkerPhase.STOPPING)
        if self.phase is WorkerPhase.RUNNING:
            self._stop()
        elif not self._left_out:
            self._free_live()

    def _free_live(self) -> None:
        if self._trained:
            self._port.drop_state(self._trained)
        self._catching_up.clear()
        self._enter(WorkerPhase.IDLE)

    # -- rounds ----------------------------------------------------------------------------

    def round_ordered(
        self,
        peer: str,
        generation: int,
        step: int,
        *,
        keep: bool = False,
        stay: tuple[Version, ...] | None = None,
        offer: bool = True,
    ) -> bool:
        """The holder orders the round that turns version `step` into the next.

        Returns whether it is to be done, after those before it.

        Args:
            keep: keep a copy of the version that it gives.
            stay: with it: versions that stay, all other copies go first; None = says nothing of
                them.
            offer: with it: let the backup peers have it.
        """
        if self.prepared is not None and generation == self.prepared.generation:
            self.begin(peer, generation)  # it overtook `generation.begin`
        if not self._is_of_running(peer, generation):
            return False
        self._keeps[step] = keep
        self._keeps.pop(step - ORDERS_REMEMBERED, None)
        if keep and stay is not None:
            self._copies.drop({StateKind.KEPT, StateKind.REPLICA}, but=stay)
        if keep and not offer:
            self._copies.keep_to_itself(Version(step + 1, generation))
        return True

    def _is_of_running(self, peer: str, generation: int) -> bool:
        running = self.running
        good = (
            self.phase is WorkerPhase.RUNNING
            and running is not None
            and (peer, generation) == (running.holder, running.generation)
        )
        self.refused += not good
        return good

    def commit(
        self, peer: str, generation: int, step: int, coefficient: Coefficient | None = None
    ) -> None:
        """The holder has decided that the update of `step` counts."""
        if not self._is_of_running(peer, generation):
            return
        version, trained = Version(step + 1, generation), self._trained
        are_ready = bool(trained) and all(one.ready == version for one in trained)
        if version == self._committed or not are_ready:
            self.refused += 1
            return
        self._committed = version
        keep = self._keeps.pop(step, False)
        self._port.apply_update(generation, version, coefficient, keep=keep)

    def caught_up(self, generation: int, first: int) -> None:
        """The stage that begins with unit `first` has made an update, or was torn by it."""
        if self.running is not None and generation == self.running.generation:
            self._catching_up.discard(first)
            if self.phase not in (WorkerPhase.RUNNING, WorkerPhase.STOPPING):
                self._apply_or_answer()

    # -- copies ----------------------------------------------------------------------------
    # Once the job is over, what was under way has no place any more.

    def copied(self, first: int, end: int, version: Version) -> None:
        """A copy of units [first, end) of an own stage stands."""
        if self.holder is None:
            return
        if self.phase is WorkerPhase.RUNNING and self.running is not None:
            self._copies.offer(self.running, first, end, version)

    def offered(self, peer: str, copy: StageCopy) -> bool:
        """`peer` has one to be kept here: whether this device reads it; `collected`."""
        # a device notified late of a generation is only prepared for it
        plan = self.running if self.phase is WorkerPhase.RUNNING else self.prepared
        return (
            self.holder is not None
            and plan is not None
            and plan.generation == copy.generation
            and (copy.first, copy.end) in plan.ranges_of(peer)
        )

    def collected(self, copy: StageCopy) -> None:
        """All of what was offered arrived, and every digest fits."""
        if self.holder is not None:
            self._report_copy(copy)

    def copy_failed(self, copy: StageCopy, reason: str) -> None:
        """One could not be had: an own one, or one offered."""
        if self.holder is not None:
            self._report_copy(copy, reason)

    def keeper_assigned(self, peer: str, copy: StageCopy, backup_peer: str) -> None:
        """The holder has copies of those units kept by `backup_peer` from that version on."""
        if self.holder is not None and self._is_of_running(peer, copy.generation) and self.running:
            self._copies.offer_to(backup_peer, self.running, copy)

    def retain(self, peer: str, versions: tuple[Version, ...]) -> None:
        """The holder names the versions that are to be kept."""
        if peer == self.holder and versions:
            self._copies.keep_only(versions)

    def _report_copy(self, copy: StageCopy, failed: str | None = None) -> None:
        for plan in (self.running, self.prepared):  # notified late: snapshots come early
            if plan is not None and plan.generation == copy.generation:
                self._port.report_copy(plan.holder, copy, failed)

    # -- trouble ---------------------------------------------------------------------------

    def holder_is(self, state: HolderState) -> None:
        """What became of the holder, or of its job."""
        orphaned = self._orphan or self.phase is WorkerPhase.ORPHANED
        if state is HolderState.ENDED or (state is HolderState.LEFT and not orphaned):
            self._forget()
        elif orphaned:
            pass  # another process of that device came and went: the job's own is still missing
        elif self.phase is WorkerPhase.RUNNING and self.running is not None:
            self._orphan = True
            self._stop()
            # its next process may have begun this generation before the news of the last one came
            self._say_stopped(self.running.holder, self.running.generation)
        elif self.phase is WorkerPhase.STOPPING:
            self._orphan = True
        elif self.holder is not None:
            self._abandon_preparation()
            self._rest()

    def _forget(self) -> None:
        """The job is over; only the number of the newest generation stays."""
        self._abandon_preparation()
        self.running = self._asked = self.holder = None
        self._rebuilds = False
        self._catching_up.clear()
        self._copies.begin()
        self._enter(WorkerPhase.IDLE)
        self._port.release_job()

    def _rest(self) -> None:
        """Keep everything for the holder's next process; where there is nothing, await nothing."""
        self._orphan = False
        if not self.entries:
            self._enter(WorkerPhase.IDLE)
        elif self.holder is not None:
            self._enter(WorkerPhase.ORPHANED)
            self._port.report_orphaned(self.holder)

    def link_ended(self, peer: str) -> None:
        """The link to `peer` broke: what was queued on it is lost."""
        if self.phase is WorkerPhase.RUNNING and self.running is not None:
            self._links.ended(self.running, peer)

    def link_started(self, peer: str) -> None:
        """There is a link to `peer`, perhaps again."""
        if self.phase is WorkerPhase.RUNNING and self.running is not None:
            self._links.started(self.running, peer)
