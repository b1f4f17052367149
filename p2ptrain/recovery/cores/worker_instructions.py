"""What a device's part in recovery says must be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.recovery.cores.worker_events import Coefficient, PrepareFailed
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.placement import Placed
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import Holding
from p2ptrain.recovery.version import Version


@dataclass(frozen=True, slots=True)
class AnswerInventory:
    """Tell `peer` what is here; the shell adds budgets, speeds and links."""

    request: int
    peer: str
    epoch: int
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
class MakeAnew:
    """Do it, then say `Rebuilt` with that request."""

    request: int
    what: Rebuild


@dataclass(frozen=True, slots=True)
class CancelAnew:
    """Nobody wants that any more."""


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
    | MakeAnew
    | CancelAnew
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
