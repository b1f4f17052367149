"""What a worker's recovery core returns to be done."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.cores.worker_events import PrepareFailed
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StateEntry
from p2ptrain.recovery.version import Version


class DeviceInstruction:
    """What a device is to do."""

    __slots__ = ()


class CopyInstruction(DeviceInstruction):
    """What is to be done with copies."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PeerInstruction(CopyInstruction):
    """What concerns `peer` too, of a copy of units [first, end)."""

    peer: str
    generation: int
    first: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class AnswerStateReport(DeviceInstruction):
    """Report to `peer` what is here; the shell adds budgets, speeds and links."""

    request: int
    peer: str
    generation: int
    holdings: tuple[StateEntry, ...]


@dataclass(frozen=True, slots=True)
class AnswerReady(DeviceInstruction):
    """Report to `peer` that its preparation stands, or what was in the way."""

    request: int
    peer: str
    generation: int
    trouble: PrepareFailed | None = None


@dataclass(frozen=True, slots=True)
class RefuseCommand(DeviceInstruction):
    """Refuse a command of `peer`."""

    request: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopStages(DeviceInstruction):
    """Cancel the generation's runners and copies, wait for what has begun, then say `Stopped`."""

    generation: int


@dataclass(frozen=True, slots=True)
class RebuildStage(DeviceInstruction):
    """Do it, then say `RebuildDone` with that request."""

    request: int
    what: Rebuild


@dataclass(frozen=True, slots=True)
class CancelRebuild(DeviceInstruction):
    """That is not wanted any more."""


@dataclass(frozen=True, slots=True)
class FetchParts(DeviceInstruction):
    """Fetch, from this device's own memory where that is the peer; say `Fetched`."""

    generation: int
    version: Version
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class BuildStages(DeviceInstruction):
    """Build the stages from what was fetched; say `Built`."""

    generation: int


@dataclass(frozen=True, slots=True)
class CancelPrepare(DeviceInstruction):
    """Stop fetching and building for `generation`; what arrived whole stays."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartStages(DeviceInstruction):
    """The prepared stages take the place of the old ones."""

    placed: Placement


@dataclass(frozen=True, slots=True)
class QueueRound(DeviceInstruction):
    """Do this round after those before it."""

    generation: int
    step: int
    keep: bool


@dataclass(frozen=True, slots=True)
class ApplyUpdate(DeviceInstruction):
    """Apply the update that gives `version` wherever its gradients are ready; report `Applied`.

    Attributes:
        keep: then copy the state, and report `SnapshotTaken`.
    """

    generation: int
    version: Version
    coefficient: Coefficient | None
    keep: bool


@dataclass(frozen=True, slots=True)
class TakeSnapshot(CopyInstruction):
    """Copy the state of all own stages, which are at `version`; report `SnapshotTaken` of each."""

    generation: int
    version: Version


@dataclass(frozen=True, slots=True)
class OfferSnapshot(PeerInstruction):
    """Offer a copy to `peer`, which backs it up."""


@dataclass(frozen=True, slots=True)
class CollectSnapshot(PeerInstruction):
    """Read a copy from `peer`, its owner; say `SnapshotCollected`."""


@dataclass(frozen=True, slots=True)
class DropState(DeviceInstruction):
    """Free these holdings."""

    holdings: tuple[StateEntry, ...]


@dataclass(frozen=True, slots=True)
class ReportSnapshot(PeerInstruction):
    """Report to `peer`, the holder, that a copy is whole here, or why it is not.

    Of another's stage where this device keeps it, of its own where no other does.
    """

    failed: str | None = None


@dataclass(frozen=True, slots=True)
class ReportLink(DeviceInstruction):
    """Report to the holder that the link to `peer`, which this generation needs, broke, or is
    back."""

    holder: str
    generation: int
    peer: str
    back: bool = False


@dataclass(frozen=True, slots=True)
class ReportOrphaned(DeviceInstruction):
    """Report that the job stands still until `holder` is back."""

    holder: str


@dataclass(frozen=True, slots=True)
class ReleaseJob(DeviceInstruction):
    """The job is over: free all of it."""
