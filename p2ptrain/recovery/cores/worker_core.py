"""One device's part in one job's recovery: whom it obeys, what it has, when it may go on.

    IDLE ──► PREPARING ──► READY ──► RUNNING ──► STOPPING ──► STOPPED ──► PREPARING ──► ...
             prepare       built     begin       inventory    flushed     prepare
                                        └─ holder gone ─► STOPPING ─► PARKED ─► inventory

What it trains (LIVE) stays until the next epoch begins: until then others may read from it, and
training may go on from it. The holder alone commands: it is the one that asked first, and stays so
while there is a job. What it asks to prepare must be newer than all it asked before, what it orders
must name the epoch that runs.

This class is a pure core: no clock, no task, no tensor. Feed it events, carry out what it returns,
in that order. The shell's `Stopped` is the truth about what is trained here.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from p2ptrain.errors import InternalError
from p2ptrain.recovery.cores import worker_events as told
from p2ptrain.recovery.cores import worker_instructions as to_do
from p2ptrain.recovery.cores.worker_state import Copies, PartnerLinks, TrainedStages
from p2ptrain.recovery.placement import Placed
from p2ptrain.recovery.state_report import Holding, Kind
from p2ptrain.recovery.version import Version

ORDERS_REMEMBERED = 64
"""Far more than are ever under way; in asynchronous training nothing else ends one here."""


class Phase(StrEnum):
    """What this device does for the job."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    PARKED = "parked"


class DeviceCore:
    """See the module.

    Args:
        device: own id.

    Attributes:
        phase: what it does.
        epoch: of the newest command obeyed; only rises.
        running: the epoch that its LIVE holdings are of, also after it was stopped.
        prepared: the epoch that it prepares or is ready for.
        refused: stale commands so far.
    """

    def __init__(self, device: str) -> None:
        self.phase = Phase.IDLE
        self.epoch = 0
        self.running: Placed | None = None
        self.prepared: Placed | None = None
        self.refused = 0
        self._device = device
        self._holder: str | None = None
        self._trained = TrainedStages()
        self._copies = Copies()
        self._asked: told.InventoryAsked | None = None  # answered once everything stands still
        self._makes_anew = False  # a lost stage, before that answer
        self._preparing: told.PrepareAsked | None = None
        self._park = False  # the stop under way is because the holder is gone
        self._abandoned: Placed | None = None  # whose preparation was given up last
        self._left_out = False  # it is because an epoch began without this device
        self._links = PartnerLinks(device)
        self._keeps: dict[int, bool] = {}  # by step, of orders not committed
        self._out: list[to_do.DeviceInstruction] = []

    @property
    def holder(self) -> str | None:
        """Whose job this is; None where there is none."""
        return self._holder

    def refusal(self, peer: str, epoch: int) -> str | None:
        """Why nothing of a command is believed; None = it may be obeyed."""
        if self._holder not in (None, peer):
            return "that job is another device's"
        if epoch < self.epoch:
            return f"epoch {epoch} is over: epoch {self.epoch} was asked for since"
        return None

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What is here, as far as is known without stopping."""
        return (*self._trained.holdings, *self._copies.holdings)

    def handle(self, event: told.DeviceEvent) -> list[to_do.DeviceInstruction]:
        """Take in one event."""
        match event:
            case told.InventoryAsked():
                self._on_inventory(event)
            case told.Rebuilt():
                self._on_rebuilt(event)
            case told.Stopped(held):
                self._on_stopped(held)
            case told.PrepareAsked():
                self._on_prepare(event)
            case told.PartFetched() | told.Fetched() | told.Built() | told.PrepareFailed():
                self._on_preparation(event)
            case told.BeginHeard(peer, epoch):
                self._on_begin(peer, epoch)
            case told.OrderHeard():
                self._on_order(event)
            case told.GradientsReady() | told.Applied() | told.Torn():
                self._on_seat(event)
            case told.CommitHeard():
                self._on_commit(event)
            case told.Kept() | told.CopyFailed() | told.OfferHeard() | told.ReplicaWhole():
                self._on_copies(event)
            case told.KeepHeard() | told.KeeperIs():
                self._on_copies(event)
            case told.Damaged(holding):
                self._copies.discard(holding)
            case told.HolderIs(state):
                self._on_holder(state)
            case told.LinkEnded() | told.LinkStarted():
                self._on_link(event)
            case _:
                raise InternalError(f"a device has no rule for {type(event).__name__}")
        out, self._out = self._out, []
        return out

    # -- taking stock ----------------------------------------------------------------------

    def _on_inventory(self, asked: told.InventoryAsked) -> None:
        if not self._obeys(asked.request, asked.peer, asked.epoch):
            return
        self._abandon_preparation()
        if self._asked is not None:
            self._refuse(self._asked.request, self._asked.peer, "asked again since")
        if self._makes_anew:
            self._makes_anew = False
            self._out.append(to_do.CancelAnew())
        self._asked = asked
        self._park = False
        if self.phase is Phase.RUNNING:
            self._stop()
        elif self.phase is not Phase.STOPPING:
            self._apply_or_answer()

    def _obeys(self, request: int, peer: str, epoch: int) -> bool:
        why = self.refusal(peer, epoch)
        if why is None and self.running is not None and epoch <= self.running.epoch:
            why = f"epoch {epoch} is over: epoch {self.running.epoch} has begun"
        if why is None and self.prepared is not None and epoch <= self.prepared.epoch:
            why = f"epoch {epoch} is prepared already"
        if why is not None:
            self._refuse(request, peer, why)
            return False
        self._holder = peer
        self.epoch = epoch
        return True

    def _refuse(self, request: int, peer: str, reason: str) -> None:
        self.refused += 1
        self._out.append(to_do.Refuse(request, peer, reason))

    def _stop(self) -> None:
        assert self.running is not None
        self.phase = Phase.STOPPING
        self._keeps.clear()
        self._out.append(to_do.Stop(self.running.epoch))

    def _on_stopped(self, held: tuple[Holding, ...]) -> None:
        if self.phase is not Phase.STOPPING:
            return
        self.phase = Phase.STOPPED
        self._trained.are(held)
        if self._left_out:
            self._left_out = False
            self._free_live()
        if self._asked is not None:
            self._apply_or_answer()
        elif self._park:
            self._rest()

    def _apply_or_answer(self) -> None:
        """Answer, unless gradients must be applied or a lost stage must be made anew first."""
        asked = self._asked
        if asked is None or self._trained.are_catching_up or self._makes_anew:
            return
        self.phase = Phase.STOPPED
        if asked.apply is not None and self._trained.are_ready_for(asked.apply):
            self._trained.catch_up(asked.apply)
            epoch = asked.apply.computed
            self._out.append(to_do.Apply(epoch, asked.apply, asked.coefficient, keep=False))
            return
        if asked.rebuild is not None:
            self._makes_anew = True
            self._out.append(to_do.MakeAnew(asked.request, asked.rebuild))
            return
        self._asked = None
        self._out.append(
            to_do.AnswerInventory(asked.request, asked.peer, self.epoch, self.holdings)
        )

    def _on_rebuilt(self, rebuilt: told.Rebuilt) -> None:
        asked, what = self._asked, rebuilt.what
        if asked is None or not self._makes_anew or asked.request != rebuilt.request:
            return  # nobody waits for it
        self._makes_anew = False
        if rebuilt.is_here:
            for holding in what.made:
                self._copies.put(holding)
        self._asked = dataclasses.replace(asked, rebuild=None)
        self._apply_or_answer()

    # -- preparing -------------------------------------------------------------------------

    def _on_prepare(self, asked: told.PrepareAsked) -> None:
        placed = asked.placed
        if placed.holder != asked.peer:
            self._refuse(asked.request, asked.peer, "that plan is another device's")
            return
        if not self._obeys(asked.request, asked.peer, placed.epoch):
            return
        if self.phase in (Phase.RUNNING, Phase.STOPPING) or self._asked is not None:
            self._refuse(asked.request, asked.peer, "this device has not stopped: take stock first")
            return
        self._abandon_preparation()
        self.phase = Phase.PREPARING
        self.prepared, self._preparing = placed, asked
        self._out += self._copies.drop({Kind.FETCHED}, but=(placed.version,))
        self._out.append(to_do.FetchParts(placed.epoch, placed.version, asked.fetches))

    def _on_preparation(self, event: told.AboutPreparation) -> None:
        asked, placed = self._preparing, self.prepared
        if asked is None or placed is None or event.epoch != placed.epoch:
            return  # of a preparation that was abandoned
        match event:
            case told.PartFetched(_, first, end, version):
                if version == placed.version:
                    self._copies.put(Holding(first, end, version, Kind.FETCHED))
            case told.Fetched(epoch):
                self._out.append(to_do.Build(epoch))
            case told.Built(epoch):
                self.phase = Phase.READY
                self._preparing = None
                self._out.append(to_do.AnswerReady(asked.request, asked.peer, epoch))
            case told.PrepareFailed(epoch):
                self.phase = Phase.STOPPED
                self.prepared = self._preparing = None
                self._out.append(to_do.AnswerReady(asked.request, asked.peer, epoch, event))

    def _abandon_preparation(self) -> None:
        if self.prepared is None:
            return
        if self._preparing is not None:
            self._refuse(self._preparing.request, self._preparing.peer, "asked again since")
        self._out.append(to_do.CancelPrepare(self.prepared.epoch))
        self._abandoned = self.prepared
        self.prepared = self._preparing = None
        self.phase = Phase.STOPPED

    # -- beginning -------------------------------------------------------------------------

    def _on_begin(self, peer: str, epoch: int) -> None:
        begun = self.running is not None and epoch <= self.running.epoch
        if begun or epoch < self.epoch or peer != self._holder:
            self.refused += not begun
            return
        if self.prepared is not None and self.prepared.epoch == epoch:
            if self.phase is Phase.READY:
                self._begin(self.prepared)
        elif self._abandoned is not None and self._abandoned.gives_part(self._device, epoch):
            # the holder believes that it still stands: all of it would wait for this device
            self._out += [to_do.TellLink(peer, epoch, peer, back) for back in (False, True)]
        else:
            self._leave_epoch(epoch)

    def _begin(self, placed: Placed) -> None:
        self.running, self.prepared = placed, None
        self._links.begin()
        self.phase = Phase.RUNNING
        self._copies.begin()
        self._trained.begin(placed.ranges_of(self._device), placed.version)
        self._out.append(to_do.Start(placed))
        self._out += self._copies.drop({Kind.FETCHED})
        # copies that never came to count; the one to go back to and the one we begin with stay
        self._out += self._copies.drop(
            {Kind.KEPT, Kind.REPLICA}, but=(placed.stable, placed.version)
        )
        if placed.keeps:
            self._out.append(to_do.Copy(placed.epoch, placed.version))

    def _leave_epoch(self, epoch: int) -> None:
        """An epoch began without this device: what it trained is of no use to anybody."""
        self._abandon_preparation()
        self.epoch = max(self.epoch, epoch)
        self._out += self._copies.drop({Kind.FETCHED})
        if self.phase is Phase.RUNNING:
            self._stop()
        self._left_out = self.phase is Phase.STOPPING
        if not self._left_out:
            self._free_live()

    def _free_live(self) -> None:
        if self._trained.holdings:
            self._out.append(to_do.Drop(self._trained.holdings))
        self._trained.clear()
        self.phase = Phase.IDLE

    # -- rounds ----------------------------------------------------------------------------

    def _on_order(self, order: told.OrderHeard) -> None:
        prepared = self.prepared
        if prepared is not None and order.epoch == prepared.epoch:
            self._on_begin(order.peer, order.epoch)  # it overtook the word that the epoch begins
        if self._is_of_running(order.peer, order.epoch):
            self._keeps[order.step] = order.keep
            self._keeps.pop(order.step - ORDERS_REMEMBERED, None)
            if order.keep and order.stay is not None:
                self._out += self._copies.drop({Kind.KEPT, Kind.REPLICA}, but=order.stay)
            if order.keep and not order.offer:
                self._copies.keep_to_itself(Version(order.step + 1, order.epoch))
            self._out.append(to_do.Queue(order.epoch, order.step, order.keep))

    def _is_of_running(self, peer: str, epoch: int) -> bool:
        running = self.running
        good = (
            self.phase is Phase.RUNNING
            and running is not None
            and (peer, epoch) == (running.holder, running.epoch)
        )
        self.refused += not good
        return good

    def _on_commit(self, commit: told.CommitHeard) -> None:
        if not self._is_of_running(commit.peer, commit.epoch):
            return
        version = Version(commit.step + 1, commit.epoch)
        if not self._trained.commit(version):
            self.refused += 1
            return
        keep = self._keeps.pop(commit.step, False)
        self._out.append(to_do.Apply(commit.epoch, version, commit.coefficient, keep))

    def _on_seat(self, event: told.GradientsReady | told.Applied | told.Torn) -> None:
        running = self.running
        if running is None or event.epoch != running.epoch:
            return
        if not self._trained.note(event, is_running=self.phase is Phase.RUNNING):
            return
        if self.phase not in (Phase.RUNNING, Phase.STOPPING):
            self._apply_or_answer()

    # -- copies ----------------------------------------------------------------------------

    def _on_copies(self, event: told.AboutCopies) -> None:
        if self._holder is None:
            return  # the job is over: what was under way has no place any more
        match event:
            case told.Kept(first, end, version):
                self._copies.put(Holding(first, end, version, Kind.KEPT))
                if self.phase is Phase.RUNNING and self.running is not None:
                    self._out += self._copies.offer(self.running, first, end, version)
            case told.OfferHeard(peer, epoch, first, end, version):
                # who hears late that an epoch begins is only prepared for it
                plan = self.running if self.phase is Phase.RUNNING else self.prepared
                if plan and plan.epoch == epoch and (first, end) in plan.ranges_of(peer):
                    self._out.append(to_do.Collect(peer, epoch, first, end, version))
            case told.ReplicaWhole(epoch, first, end, version):
                self._copies.put(Holding(first, end, version, Kind.REPLICA))
                self._tell_replica(epoch, first, end, version)
            case told.CopyFailed(epoch, first, end, version, reason):
                self._tell_replica(epoch, first, end, version, reason)
            case told.KeeperIs(peer, epoch, first, end, version, keeper):
                if self._is_of_running(peer, epoch) and self.running is not None:
                    units = (first, end)
                    self._out += self._copies.offer_to(keeper, self.running, *units, version)
            case told.KeepHeard(peer, versions):
                if peer == self._holder and versions:
                    self._out += self._copies.keep_only(versions)

    def _tell_replica(
        self, epoch: int, first: int, end: int, version: Version, failed: str | None = None
    ) -> None:
        for plan in (self.running, self.prepared):  # who hears late that it begins has copies early
            if plan is not None and plan.epoch == epoch:
                told = to_do.TellReplica(plan.holder, epoch, first, end, version, failed)
                self._out.append(told)

    # -- trouble ---------------------------------------------------------------------------

    def _on_holder(self, state: told.HolderState) -> None:
        parked = self._park or self.phase is Phase.PARKED
        if state is told.HolderState.ENDED or (state is told.HolderState.LEFT and not parked):
            self._forget()
        elif parked:
            pass  # another process of that device came and went: the job's own is still missing
        elif self.phase is Phase.RUNNING:
            self._park = True
            self._stop()
        elif self.phase is Phase.STOPPING:
            self._park = True
        elif self._holder is not None:
            self._abandon_preparation()
            self._rest()

    def _forget(self) -> None:
        """The job is over; only the number of the newest epoch stays."""
        self._abandon_preparation()
        self.phase = Phase.IDLE
        self.running = self._asked = self._holder = None
        self._makes_anew = False
        self._trained.clear()
        self._copies.clear()
        self._out.append(to_do.Release())

    def _rest(self) -> None:
        """Keep everything for the holder's next process; where there is nothing, await nothing."""
        self._park = False
        if not self.holdings:
            self.phase = Phase.IDLE
        elif self._holder is not None:
            self.phase = Phase.PARKED
            self._out.append(to_do.Wait(self._holder))

    def _on_link(self, event: told.AboutLinks) -> None:
        if self.phase is Phase.RUNNING and self.running is not None:
            note = self._links.ended if isinstance(event, told.LinkEnded) else self._links.started
            self._out += note(self.running, event.peer)
