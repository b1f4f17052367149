"""What a worker's recovery core has done, as one port: a session does it, and the simulator's node.

What takes time is begun here; the core's method named with it says how it went.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import PrepareFailed
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StageCopy, StateEntry
from p2ptrain.recovery.version import Version


class WorkerPhase(StrEnum):
    """What this device does for the job."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ORPHANED = "orphaned"


class HolderState(StrEnum):
    """What has become of the device with the data."""

    GONE = "gone"
    """Its process has ended, or is out of reach: it may come back and go on."""
    LEFT = "left"
    """Its process has left the household."""
    ENDED = "ended"
    """It says that the job is over."""


@dataclass(frozen=True, slots=True)
class StateReportAsked:
    """The holder `peer` wants this device to stop, and to say what is here.

    Attributes:
        request: names the answer.
        apply: a version; where gradients are ready for it, they are applied first.
        rebuild: a lost stage that this device rebuilds first, or what it has that it calls
            another version.
    """

    request: int
    peer: str
    generation: int
    apply: Version | None = None
    coefficient: Coefficient | None = None
    rebuild: Rebuild | None = None


class WorkerPort(Protocol):
    """See the module."""

    def entries(self) -> tuple[StateEntry, ...]:
        """What is here now; nothing torn, nothing half arrived."""

    def answer_state(self, request: int, peer: str, entries: tuple[StateEntry, ...]) -> None:
        """Report what is here; budgets, speeds and links are added."""

    def answer_ready(self, request: int, peer: str, trouble: PrepareFailed | None) -> None:
        """Report that a preparation stands, or what was in the way."""

    def refuse(self, request: int, peer: str, reason: str) -> None:
        """Refuse a command."""

    def stop_stages(self) -> None:
        """Cancel executors and copies, wait for what has begun; `stopped`."""

    def rebuild_stage(self, request: int, what: Rebuild) -> None:
        """Do it; `rebuilt`."""

    def cancel_rebuild(self) -> None:
        """That is not wanted any more."""

    def make_ready(self, generation: int, version: Version, fetches: tuple[Fetch, ...]) -> None:
        """Fetch, from this device's own memory where that is the peer, and build; `built`."""

    def cancel_prepare(self) -> None:
        """Fetch and build no more; what arrived whole stays."""

    def start_stages(self, placed: Placement) -> None:
        """The prepared stages take the place of the old ones."""

    def apply_update(
        self, generation: int, version: Version, coefficient: Coefficient | None, *, keep: bool
    ) -> None:
        """Make the update that gives `version` wherever its gradients are ready; `caught_up`.

        Args:
            keep: then copy the state; `copied`.
        """

    def drop_state(self, entries: tuple[StateEntry, ...]) -> None:
        """Free these."""

    def copy_stages(self, version: Version) -> None:
        """Copy the state of all own stages, which are at `version`; `copied`, of each."""

    def offer_copy(self, peer: str, copy: StageCopy) -> None:
        """Offer an own copy to `peer`, which backs it up."""

    def report_copy(self, holder: str, copy: StageCopy, failed: str | None) -> None:
        """Report that a copy is whole here, or why it is not.

        Of another's stage where this device keeps it, of its own where no other does.
        """

    def report_link(self, holder: str, generation: int, peer: str, *, back: bool) -> None:
        """Report that the link to `peer`, which this generation needs, broke, or is back."""

    def report_orphaned(self, holder: str) -> None:
        """Report that the job stands still until `holder` is back."""

    def release_job(self) -> None:
        """The job is over: free all of it."""

    def phase_changed(self) -> None:
        """What this device does for the job is something else now."""
