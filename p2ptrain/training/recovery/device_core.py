"""One device's part in one job's recovery: whom it obeys, what it has, when it may go on.

    IDLE ──► PREPARING ──► READY ──► RUNNING ──► STOPPING ──► STOPPED ──► PREPARING ──► ...
             prepare       built     begin       inventory    flushed     prepare
                                        └─ holder gone ─► STOPPING ─► PARKED ─► inventory

What it trains (LIVE) stays until the next epoch begins: until then others may read from it, and
training may go on from it. Commands of a coordinator pass the fence, commands of the holder must
name the epoch that runs.

This class is a pure core: no clock, no task, no tensor. Feed it events, carry out what it returns,
in that order. The shell's `Stopped` is the truth about what is trained here.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from p2ptrain.errors import InternalError
from p2ptrain.training.recovery.copies import Copies
from p2ptrain.training.recovery.device_events import (
    Applied,
    BeginHeard,
    Built,
    CommitHeard,
    Coordinates,
    CopyFailed,
    Damaged,
    DeviceEvent,
    Fetched,
    GradientsReady,
    HolderIs,
    HolderState,
    InventoryAsked,
    KeeperIs,
    KeepHeard,
    Kept,
    LinkEnded,
    LinkStarted,
    OfferHeard,
    OrderHeard,
    PartFetched,
    PrepareAsked,
    PrepareFailed,
    ReplicaWhole,
    Stopped,
    Torn,
)
from p2ptrain.training.recovery.device_instructions import (
    AnswerInventory,
    AnswerReady,
    Apply,
    Build,
    CancelPrepare,
    Collect,
    Copy,
    DeviceInstruction,
    Drop,
    FetchParts,
    Queue,
    Refuse,
    Release,
    Start,
    Stop,
    TellLink,
    TellReplica,
    Wait,
)
from p2ptrain.training.recovery.fence import Fence
from p2ptrain.training.recovery.holdings import Holding, Kind
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.version import Version


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
        fence: newest command obeyed.
        running: the epoch that its LIVE holdings are of, also after it was stopped.
        prepared: the epoch that it prepares or is ready for.
        refused: stale commands so far.
    """

    def __init__(self, device: str) -> None:
        self.phase = Phase.IDLE
        self.fence = Fence()
        self.running: Placed | None = None
        self.prepared: Placed | None = None
        self.refused = 0
        self._device = device
        self._holder: str | None = None
        self._coordinator: tuple[str, int] | None = None
        self._live: dict[int, Holding] = {}  # by first unit
        self._copies = Copies()
        self._asked: InventoryAsked | None = None  # answered once everything stands still
        self._preparing: PrepareAsked | None = None
        self._applying: set[int] = set()  # first units of stages that roll forward
        self._park = False  # the stop under way is because the holder is gone
        self._abandoned: Placed | None = None  # whose preparation was given up last
        self._left_out = False  # it is because an epoch began without this device
        self._broken: set[str] = set()  # peers; links whose end the holder was told of
        self._keeps: dict[int, bool] = {}  # by step, of orders not committed
        self._out: list[DeviceInstruction] = []

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What is here, as far as is known without stopping."""
        return (*self._live.values(), *self._copies.holdings)

    def handle(self, event: DeviceEvent) -> list[DeviceInstruction]:
        """Take in one event."""
        match event:
            case Coordinates(device, term):
                self._coordinator = None if device is None else (device, term)
            case InventoryAsked():
                self._on_inventory(event)
            case Stopped(held):
                self._on_stopped(held)
            case PrepareAsked():
                self._on_prepare(event)
            case PartFetched() | Fetched() | Built() | PrepareFailed():
                self._on_preparation(event)
            case BeginHeard(peer, epoch):
                self._on_begin(peer, epoch)
            case OrderHeard():
                self._on_order(event)
            case GradientsReady() | Applied() | Torn():
                self._on_seat(event)
            case CommitHeard():
                self._on_commit(event)
            case Kept() | OfferHeard() | ReplicaWhole() | KeepHeard() | CopyFailed() | KeeperIs():
                self._on_copies(event)
            case Damaged(holding):
                self._copies.discard(holding)
            case HolderIs(state):
                self._on_holder(state)
            case LinkEnded(peer):
                self._on_link_ended(peer)
            case LinkStarted(peer):
                self._on_link_started(peer)
            case _:
                raise InternalError(f"a device has no rule for {type(event).__name__}")
        out, self._out = self._out, []
        return out

    # -- taking stock ----------------------------------------------------------------------

    def _on_inventory(self, asked: InventoryAsked) -> None:
        if not self._obeys(asked.request, asked.peer, asked.term, asked.epoch):
            return
        self._holder = asked.holder
        self._abandon_preparation()
        if self._asked is not None:
            self._refuse(self._asked.request, self._asked.peer, "asked again since")
        self._asked = asked
        self._park = False
        if self.phase is Phase.RUNNING:
            self._stop()
        elif self.phase is not Phase.STOPPING:
            self._apply_or_answer()

    def _obeys(self, request: int, peer: str, term: int, epoch: int) -> bool:
        why = self.fence.refusal(peer, term, epoch, self._coordinator)
        if why is None and self.running is not None and epoch <= self.running.epoch:
            why = f"epoch {epoch} is over: epoch {self.running.epoch} has begun"
        if why is None and self.prepared is not None and epoch <= self.prepared.epoch:
            why = f"epoch {epoch} is prepared already"
        if why is not None:
            self._refuse(request, peer, why)
            return False
        self.fence = self.fence.raised(term, epoch)
        return True

    def _refuse(self, request: int, peer: str, reason: str) -> None:
        self.refused += 1
        self._out.append(Refuse(request, peer, reason))

    def _stop(self) -> None:
        assert self.running is not None
        self.phase = Phase.STOPPING
        self._keeps.clear()
        self._out.append(Stop(self.running.epoch))

    def _on_stopped(self, held: tuple[Holding, ...]) -> None:
        if self.phase is not Phase.STOPPING:
            return
        self.phase = Phase.STOPPED
        self._live = {holding.first: holding for holding in held}
        if self._left_out:
            self._left_out = False
            self._free_live()
        if self._asked is not None:
            self._apply_or_answer()
        elif self._park:
            self._rest()

    def _apply_or_answer(self) -> None:
        """Answer, unless gradients that are ready must be applied first."""
        asked = self._asked
        if asked is None or self._applying:
            return
        self.phase = Phase.STOPPED
        if asked.apply is not None and self._ready_for(asked.apply):
            self._applying = {holding.first for holding in self._ready_for(asked.apply)}
            epoch = asked.apply.computed
            self._out.append(Apply(epoch, asked.apply, asked.coefficient, keep=False))
            return
        self._asked = None
        fence = self.fence
        self._out.append(
            AnswerInventory(asked.request, asked.peer, fence.epoch, fence.term, self.holdings)
        )

    def _ready_for(self, version: Version) -> list[Holding]:
        return [holding for holding in self._live.values() if holding.ready == version]

    # -- preparing -------------------------------------------------------------------------

    def _on_prepare(self, asked: PrepareAsked) -> None:
        placed = asked.placed
        if not self._obeys(asked.request, asked.peer, placed.term, placed.epoch):
            return
        if self.phase in (Phase.RUNNING, Phase.STOPPING) or self._asked is not None:
            self._refuse(asked.request, asked.peer, "this device has not stopped: take stock first")
            return
        self._abandon_preparation()
        self._holder = placed.holder
        self.phase = Phase.PREPARING
        self.prepared, self._preparing = placed, asked
        self._out += self._copies.drop({Kind.FETCHED}, but=(placed.version,))
        self._out.append(FetchParts(placed.epoch, placed.version, asked.fetches))

    def _on_preparation(self, event: PartFetched | Fetched | Built | PrepareFailed) -> None:
        asked, placed = self._preparing, self.prepared
        if asked is None or placed is None or event.epoch != placed.epoch:
            return  # of a preparation that was abandoned
        match event:
            case PartFetched(_, first, end, version):
                if version == placed.version:
                    self._copies.put(Holding(first, end, version, Kind.FETCHED))
            case Fetched(epoch):
                self._out.append(Build(epoch))
            case Built(epoch):
                self.phase = Phase.READY
                self._preparing = None
                self._out.append(AnswerReady(asked.request, asked.peer, epoch))
            case PrepareFailed(epoch):
                self.phase = Phase.STOPPED
                self.prepared = self._preparing = None
                self._out.append(AnswerReady(asked.request, asked.peer, epoch, event))

    def _abandon_preparation(self) -> None:
        if self.prepared is None:
            return
        if self._preparing is not None:
            self._refuse(self._preparing.request, self._preparing.peer, "asked again since")
        self._out.append(CancelPrepare(self.prepared.epoch))
        self._abandoned = self.prepared
        self.prepared = self._preparing = None
        self.phase = Phase.STOPPED

    # -- beginning -------------------------------------------------------------------------

    def _on_begin(self, peer: str, epoch: int) -> None:
        begun = self.running is not None and epoch <= self.running.epoch
        if begun or epoch < self.fence.epoch or peer != self._holder:
            self.refused += not begun
            return
        if self.prepared is not None and self.prepared.epoch == epoch:
            if self.phase is Phase.READY:
                self._begin(self.prepared)
        elif self._has_abandoned(epoch):
            # the holder believes that it still stands: all of it would wait for this device
            self._out += [TellLink(peer, epoch, peer, back) for back in (False, True)]
        else:
            self._leave_epoch(epoch)

    def _has_abandoned(self, epoch: int) -> bool:
        given_up = self._abandoned
        return given_up is not None and epoch == given_up.epoch and self._device in given_up.devices

    def _begin(self, placed: Placed) -> None:
        self.fence = self.fence.raised(placed.term, placed.epoch)
        self.running, self.prepared = placed, None
        self._broken.clear()
        self.phase = Phase.RUNNING
        self._copies.begin()
        self._live = {
            first: Holding(first, end, placed.version, Kind.LIVE)
            for first, end in placed.ranges_of(self._device)
        }
        self._out.append(Start(placed))
        self._out += self._copies.drop({Kind.FETCHED})
        # copies that never came to count; the one to go back to and the one we begin with stay
        self._out += self._copies.drop(
            {Kind.KEPT, Kind.REPLICA}, but=(placed.stable, placed.version)
        )
        if placed.keeps:
            self._out.append(Copy(placed.epoch, placed.version))

    def _leave_epoch(self, epoch: int) -> None:
        """An epoch began without this device: what it trained is of no use to anybody."""
        self._abandon_preparation()
        self.fence = self.fence.raised(0, epoch)
        self._out += self._copies.drop({Kind.FETCHED})
        if self.phase is Phase.RUNNING:
            self._stop()
        self._left_out = self.phase is Phase.STOPPING
        if not self._left_out:
            self._free_live()

    def _free_live(self) -> None:
        if self._live:
            self._out.append(Drop(tuple(self._live.values())))
        self._live.clear()
        self.phase = Phase.IDLE

    # -- rounds ----------------------------------------------------------------------------

    def _on_order(self, order: OrderHeard) -> None:
        prepared = self.prepared
        if prepared is not None and order.epoch == prepared.epoch:
            self._on_begin(order.peer, order.epoch)  # it overtook the word that the epoch begins
        if self._is_of_running(order.peer, order.epoch):
            self._keeps[order.step] = order.keep
            if order.keep and order.stay is not None:
                self._out += self._copies.drop({Kind.KEPT, Kind.REPLICA}, but=order.stay)
            self._out.append(Queue(order.epoch, order.step, order.keep))

    def _is_of_running(self, peer: str, epoch: int) -> bool:
        running = self.running
        good = (
            self.phase is Phase.RUNNING
            and running is not None
            and (peer, epoch) == (running.holder, running.epoch)
        )
        self.refused += not good
        return good

    def _on_commit(self, commit: CommitHeard) -> None:
        if not self._is_of_running(commit.peer, commit.epoch):
            return
        version = Version(commit.step + 1, commit.epoch)
        ready = self._ready_for(version)
        if not ready or len(ready) < len(self._live):
            self.refused += 1
            return
        for holding in ready:
            # once only: a second word of the same commit finds nothing ready
            self._live[holding.first] = dataclasses.replace(holding, ready=None)
        keep = self._keeps.pop(commit.step, False)
        self._out.append(Apply(commit.epoch, version, commit.coefficient, keep))

    def _on_seat(self, event: GradientsReady | Applied | Torn) -> None:
        running = self.running
        holding = self._live.get(event.first)
        if running is None or event.epoch != running.epoch or holding is None:
            return
        match event:
            case GradientsReady(epoch, first, step):
                if self.phase is Phase.RUNNING and holding.version.step == step:
                    ready = Version(step + 1, epoch)
                    self._live[first] = dataclasses.replace(holding, ready=ready)
            case Applied(_, first, version, coefficient):
                self._live[first] = dataclasses.replace(
                    holding, version=version, ready=None, coefficient=coefficient
                )
            case Torn(_, first):
                del self._live[first]
        self._applying.discard(event.first)
        if self.phase not in (Phase.RUNNING, Phase.STOPPING):
            self._apply_or_answer()

    # -- copies ----------------------------------------------------------------------------

    def _on_copies(
        self, event: Kept | OfferHeard | ReplicaWhole | KeepHeard | CopyFailed | KeeperIs
    ) -> None:
        if self._holder is None:
            return  # the job is over: what was under way has no place any more
        match event:
            case Kept(first, end, version):
                self._copies.put(Holding(first, end, version, Kind.KEPT))
                if self.phase is Phase.RUNNING and self.running is not None:
                    self._out += self._copies.offer(self.running, first, end, version)
            case OfferHeard(peer, epoch, first, end, version):
                # who hears late that an epoch begins is only prepared for it
                plan = self.running if self.phase is Phase.RUNNING else self.prepared
                if plan and plan.epoch == epoch and (first, end) in plan.ranges_of(peer):
                    self._out.append(Collect(peer, epoch, first, end, version))
            case ReplicaWhole(epoch, first, end, version):
                self._copies.put(Holding(first, end, version, Kind.REPLICA))
                self._tell_replica(epoch, first, end, version)
            case CopyFailed(epoch, first, end, version, reason):
                self._tell_replica(epoch, first, end, version, reason)
            case KeeperIs(peer, epoch, first, end, version, keeper):
                if self._is_of_running(peer, epoch) and self.running is not None:
                    units = (first, end)
                    self._out += self._copies.offer_to(keeper, self.running, *units, version)
            case KeepHeard(peer, versions):
                if peer == self._holder and versions:
                    self._out += self._copies.keep_only(versions)

    def _tell_replica(
        self, epoch: int, first: int, end: int, version: Version, failed: str | None = None
    ) -> None:
        running = self.running
        if running is not None and running.epoch == epoch:
            self._out.append(TellReplica(running.holder, epoch, first, end, version, failed))

    # -- trouble ---------------------------------------------------------------------------

    def _on_holder(self, state: HolderState) -> None:
        parked = self._park or self.phase is Phase.PARKED
        if state is HolderState.ENDED or (state is HolderState.LEFT and not parked):
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
        """The job is over; only the fence stays."""
        self._abandon_preparation()
        self.phase = Phase.IDLE
        self.running = self._asked = self._holder = None
        self._live.clear()
        self._copies.clear()
        self._applying.clear()
        self._out.append(Release())

    def _rest(self) -> None:
        """Keep everything for the holder's next process; where there is nothing, await nothing."""
        self._park = False
        if not self.holdings:
            self.phase = Phase.IDLE
        elif self._holder is not None:
            self.phase = Phase.PARKED
            self._out.append(Wait(self._holder))

    def _on_link_ended(self, peer: str) -> None:
        running = self.running
        if self.phase is not Phase.RUNNING or running is None:
            return
        if running.holder in (peer, self._device):
            return  # the holder sees its own links
        if peer in running.partners_of(self._device):
            self._broken.add(peer)
            self._out.append(TellLink(running.holder, running.epoch, peer))

    def _on_link_started(self, peer: str) -> None:
        running = self.running
        if peer in self._broken and running is not None and self.phase is Phase.RUNNING:
            self._broken.discard(peer)
            self._out.append(TellLink(running.holder, running.epoch, peer, back=True))
