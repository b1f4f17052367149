"""What a device's part in recovery hears, and what it says must be done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from p2ptrain.training.recovery.fetches import Fetch
from p2ptrain.training.recovery.holdings import Holding
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.version import Version

Coefficient: TypeAlias = tuple[float, str]
"""What clipping multiplies gradients with, and its dtype."""


class HolderState(StrEnum):
    """What has become of the device with the data."""

    GONE = "gone"
    """Its process has ended, or is out of reach: it may come back and go on."""
    LEFT = "left"
    """Its process has left the household."""
    ENDED = "ended"
    """It says that the job is over."""


# -- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Coordinates:
    """This device follows `device` in `term`; None = nobody."""

    device: str | None
    term: int


@dataclass(frozen=True, slots=True)
class InventoryAsked:
    """Stop, and say what is here.

    Attributes:
        request: names the answer.
        apply: a version; where gradients are ready for it, they are applied first.
    """

    request: int
    peer: str
    term: int
    epoch: int
    holder: str
    apply: Version | None = None
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing of the old epoch runs any more, in no thread.

    Attributes:
        held: LIVE holdings; none of what is torn.
    """

    held: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class PrepareAsked:
    """Fetch and build the own part of `placed`."""

    request: int
    peer: str
    placed: Placed
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class PartFetched:
    """Units [first, end) arrived whole, for `epoch`."""

    epoch: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Fetched:
    """Everything arrived."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Built:
    """The stages stand."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """It will not stand.

    Attributes:
        source: the peer that could not deliver.
        memory_bytes: what this device has, where it was too little.
    """

    epoch: int
    reason: str
    source: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BeginHeard:
    """The holder says that `epoch` is in force."""

    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class OrderHeard:
    """The holder orders the round that turns version `step` into the next.

    Attributes:
        keep: keep a copy of the version that it gives.
        stay: with it: versions that stay, all other copies go first; None = says nothing of them.
    """

    peer: str
    epoch: int
    step: int
    keep: bool = False
    stay: tuple[Version, ...] | None = None


@dataclass(frozen=True, slots=True)
class GradientsReady:
    """The gradients of the stage that begins with unit `first` are complete for that step."""

    epoch: int
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class CommitHeard:
    """The holder has decided that the update of `step` counts."""

    peer: str
    epoch: int
    step: int
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """The stage that begins with unit `first` is at `version`."""

    epoch: int
    first: int
    version: Version
    coefficient: Coefficient | None = None


@dataclass(frozen=True, slots=True)
class Torn:
    """An update failed half-way: the stage that begins with unit `first` is of no use any more."""

    epoch: int
    first: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of units [first, end) at `version` stands."""

    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """A copy of units [first, end) at `version` could not be had: an own one, or one offered."""

    epoch: int
    first: int
    end: int
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class KeeperIs:
    """The holder has the copies of units [first, end) kept by `keeper` from `version` on."""

    peer: str
    epoch: int
    first: int
    end: int
    version: Version
    keeper: str


@dataclass(frozen=True, slots=True)
class OfferHeard:
    """`peer` has a copy of units [first, end) to be kept here."""

    peer: str
    epoch: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class ReplicaWhole:
    """All of what was offered arrived, and every digest fits."""

    epoch: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class KeepHeard:
    """The holder names the versions that are to be kept."""

    peer: str
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Damaged:
    """A copy does not fit its checksums any more; it has been freed."""

    holding: Holding


@dataclass(frozen=True, slots=True)
class HolderIs:
    """What became of the holder, or of its job."""

    state: HolderState


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The link to `peer` broke: what was queued on it is lost."""

    peer: str


@dataclass(frozen=True, slots=True)
class LinkStarted:
    """There is a link to `peer`, perhaps again."""

    peer: str


DeviceEvent: TypeAlias = (
    Coordinates
    | InventoryAsked
    | Stopped
    | PrepareAsked
    | PartFetched
    | Fetched
    | Built
    | PrepareFailed
    | BeginHeard
    | OrderHeard
    | GradientsReady
    | CommitHeard
    | Applied
    | Torn
    | Kept
    | CopyFailed
    | KeeperIs
    | OfferHeard
    | ReplicaWhole
    | KeepHeard
    | Damaged
    | HolderIs
    | LinkEnded
    | LinkStarted
)


# -- instructions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerInventory:
    """Tell `peer` what is here; the shell adds budgets, speeds and links."""

    request: int
    peer: str
    epoch: int
    term: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class AnswerReady:
    """Tell `peer` that its preparation stands, or what was in the way."""

    request: int
    peer: str
    epoch: int
    trouble: PrepareFailed | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell `peer` that it is not obeyed."""

    request: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel the epoch's runners and copies, wait for what has begun, then say `Stopped`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FetchParts:
    """Fetch, from this device's own memory where that is the peer; say `Fetched`."""

    epoch: int
    version: Version
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """Build the stages from what was fetched; say `Built`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CancelPrepare:
    """Stop fetching and building for `epoch`; what arrived whole stays."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Start:
    """The prepared stages take the place of the old ones."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class Queue:
    """Do this round after those before it."""

    epoch: int
    step: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the update that gives `version` wherever its gradients are ready; say `Applied`.

    Attributes:
        keep: then copy the state, and say `Kept`.
    """

    epoch: int
    version: Version
    coefficient: Coefficient | None
    keep: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the state of all own stages, which are at `version`; say `Kept` of each."""

    epoch: int
    version: Version


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer a copy to its keeper."""

    keeper: str
    epoch: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Collect:
    """Read a copy from its owner; say `ReplicaWhole`."""

    owner: str
    epoch: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Drop:
    """Free these holdings."""

    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class TellReplica:
    """Tell the holder that a copy is whole here, or why it is not.

    Of another's stage where this device keeps it, of its own where nobody else does.
    """

    holder: str
    epoch: int
    first: int
    end: int
    version: Version
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class TellLink:
    """Tell the holder that the link to `peer`, which this epoch needs, broke, or is back."""

    holder: str
    epoch: int
    peer: str
    back: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Tell people that the job stands still until `holder` is back."""

    holder: str


@dataclass(frozen=True, slots=True)
class Release:
    """The job is over: free all of it."""


DeviceInstruction: TypeAlias = (
    AnswerInventory
    | AnswerReady
    | Refuse
    | Stop
    | FetchParts
    | Build
    | CancelPrepare
    | Start
    | Queue
    | Apply
    | Copy
    | Offer
    | Collect
    | Drop
    | TellReplica
    | TellLink
    | Wait
    | Release
)
