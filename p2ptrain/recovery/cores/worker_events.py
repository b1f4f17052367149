"""Events of a worker's recovery core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.plan.types.memory_budgets import MemoryShortage
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StateEntry
from p2ptrain.recovery.version import Version


class HolderState(StrEnum):
    """What has become of the device with the data."""

    GONE = "gone"
    """Its process has ended, or is out of reach: it may come back and go on."""
    LEFT = "left"
    """Its process has left the household."""
    ENDED = "ended"
    """It says that the job is over."""


class DeviceEvent:
    """What happens to a device."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AboutPreparation(DeviceEvent):
    """What becomes of the preparation of `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class AboutSeat(DeviceEvent):
    """What becomes of the stage that begins with unit `first`."""

    generation: int
    first: int


@dataclass(frozen=True, slots=True)
class HolderAsks(DeviceEvent):
    """The holder `peer` wants something; `request` names the answer."""

    request: int
    peer: str


class AboutCopies(DeviceEvent):
    """What becomes of copies, or shall."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SnapshotEvent(AboutCopies):
    """What becomes of a copy of units [first, end)."""

    generation: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class PeersSnapshot(AboutCopies):
    """What `peer` says of a copy of units [first, end)."""

    peer: str
    generation: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class AboutLinks(DeviceEvent):
    """What becomes of the link to `peer`."""

    peer: str


@dataclass(frozen=True, slots=True)
class StateReportAsked(HolderAsks):
    """This device is to stop, and to say what is here.

    Attributes:
        apply: a version; where gradients are ready for it, they are applied first.
        rebuild: a lost stage that this device rebuilds first, or what it has that it calls
            another version.
    """

    generation: int
    apply: Version | None = None
    coefficient: Coefficient | None = None
    rebuild: Rebuild | None = None


@dataclass(frozen=True, slots=True)
class RebuildDone(DeviceEvent):
    """What was asked for with an inventory is here now, or could not be made.

    Attributes:
        request: the inventory's.
    """

    request: int
    what: Rebuild
    is_here: bool


@dataclass(frozen=True, slots=True)
class GenerationStopped(DeviceEvent):
    """Nothing of the old generation runs any more, in no thread.

    Attributes:
        held: LIVE holdings; none of what is torn.
    """

    held: tuple[StateEntry, ...]


@dataclass(frozen=True, slots=True)
class PrepareAsked(HolderAsks):
    """Fetch and build the own part of `placed`."""

    placed: Placement
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class PartFetched(AboutPreparation):
    """Units [first, end) arrived whole, for `generation`."""

    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Fetched(AboutPreparation):
    """Everything arrived."""


@dataclass(frozen=True, slots=True)
class Built(AboutPreparation):
    """The stages stand."""


@dataclass(frozen=True, slots=True)
class PrepareFailed(AboutPreparation):
    """It will not stand.

    Attributes:
        source: the peer that could not deliver.
        short: which memory of this device was too small.
        is_link: only the link to it ended.
    """

    reason: str
    source: str | None = None
    short: MemoryShortage | None = None
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class BeginReceived(DeviceEvent):
    """The holder says that `generation` is in force."""

    peer: str
    generation: int


@dataclass(frozen=True, slots=True)
class RoundOrdered(DeviceEvent):
    """The holder orders the round that turns version `step` into the next.

    Attributes:
        keep: keep a copy of the version that it gives.
        stay: with it: versions that stay, all other copies go first; None = says nothing of them.
        offer: with it: let the backup peers have it.
    """

    peer: str
    generation: int
    step: int
    keep: bool = False
    stay: tuple[Version, ...] | None = None
    offer: bool = True


@dataclass(frozen=True, slots=True)
class GradientsReady(AboutSeat):
    """The gradients of the stage that begins with unit `first` are complete for that step."""

    step: int


@dataclass(frozen=True, slots=True)
class CommitReceived(DeviceEvent):
    """The holder has decided that the update of `step` counts."""

    peer: str
    generation: int
    step: int
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class Applied(AboutSeat):
    """The stage that begins with unit `first` is at `version`."""

    version: Version
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class UpdateTorn(AboutSeat):
    """An update failed half-way: the stage that begins with unit `first` is of no use any more."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken(AboutCopies):
    """A copy of units [first, end) at `version` stands."""

    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class SnapshotFailed(SnapshotEvent):
    """A copy of units [first, end) at `version` could not be had: an own one, or one offered."""

    reason: str


@dataclass(frozen=True, slots=True)
class BackupPeerAssigned(PeersSnapshot):
    """The holder has the copies of units [first, end) kept by `keeper` from `version` on."""

    keeper: str


@dataclass(frozen=True, slots=True)
class OfferReceived(PeersSnapshot):
    """`peer` has a copy of units [first, end) to be kept here."""


@dataclass(frozen=True, slots=True)
class SnapshotCollected(SnapshotEvent):
    """All of what was offered arrived, and every digest fits."""


@dataclass(frozen=True, slots=True)
class RetainReceived(AboutCopies):
    """The holder names the versions that are to be kept."""

    peer: str
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class SnapshotDamaged(DeviceEvent):
    """A copy does not fit its checksums any more; it has been freed."""

    holding: StateEntry


@dataclass(frozen=True, slots=True)
class HolderChanged(DeviceEvent):
    """What became of the holder, or of its job."""

    state: HolderState


@dataclass(frozen=True, slots=True)
class LinkEnded(AboutLinks):
    """The link to `peer` broke: what was queued on it is lost."""


@dataclass(frozen=True, slots=True)
class LinkStarted(AboutLinks):
    """There is a link to `peer`, perhaps again."""
