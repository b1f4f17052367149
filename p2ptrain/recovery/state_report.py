"""What a device has of a job, as it reports it to the holder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeAlias

from p2ptrain.net.fields import LARGE, Blob, BlobLimit, check_units
from p2ptrain.net.forms import AboveZero, Bytes, Count, Flat, Id, Length, Row, Seconds
from p2ptrain.plan.types.memory_budgets import NO_MEMORY, MemoryBudgets
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.recovery.version import Version, VersionRow

HOLDINGS_LIMIT = 1024
"""Most entries of one device: kinds x kept versions x ranges of units, far below."""


class StateKind(StrEnum):
    """Why a device has it."""

    LIVE = "live"
    """It trains these units."""
    KEPT = "kept"
    """Its copy of its own stage at a version to go back to."""
    REPLICA = "replica"
    """Another device's copy, whole and acknowledged."""
    FETCHED = "fetched"
    """Fetched for a generation that has not begun."""
    INITIAL = "initial"
    """The weights that the job began with, in the holder's memory."""
    GLOBAL = "global"
    """All units at one version, at the holder. Nothing makes one yet."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """Units [first, end) at one version.

    Attributes:
        ready: LIVE only: the version that applying the gradients gives, which are complete and
            not applied; None = there are none.
        coefficient: LIVE only: what clipping multiplied the last update's gradients with, and its
            dtype; None where the job does not clip. A device that applies later needs it.
    """

    first: Count
    end: Count
    version: VersionRow
    kind: StateKind
    ready: VersionRow | None = None
    coefficient: Coefficient | None = None

    def __post_init__(self) -> None:
        check_units(self.first, self.end)

    def has(self, unit: int) -> bool:
        """Whether `unit` is one of these."""
        return self.first <= unit < self.end


@dataclass(frozen=True, slots=True)
class StageCopy:
    """A copy of units [first, end), made in the generation `generation`."""

    generation: Count
    first: Count
    end: Count
    version: Annotated[Version, Flat()]

    def __post_init__(self) -> None:
        check_units(self.first, self.end)


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """A device still has all that it sent and was ordered in `generation`, from step `since` on."""

    generation: Count
    since: Count


Speed: TypeAlias = tuple[Id, AboveZero, Seconds]
"""Of a link to a peer: bytes/s, and seconds of latency."""


@dataclass(frozen=True, slots=True)
class StateReport(Blob):
    """A device's answer; it has stopped working on the job before it gives it.

    Attributes:
        device: its id.
        generation: newest that it prepared, ran or was asked about.
        entries: what it has; nothing torn, nothing half arrived.
        linked: ids of the peers that it has a link to.
        memory: what it offered the job when it was idle; less where others have taken of it.
        taken_bytes: what the job takes there now.
        speeds: (peer, bytes/s, latency in seconds) as it measured them, sending.
        measured: its cached profile, None where there is none.
        logged: what of its last generation could be done again with; None = nothing.
        compute: with what it computes.
    """

    LIMIT: ClassVar[BlobLimit] = LARGE

    device: Id
    generation: Count = 0
    entries: Annotated[tuple[StateEntry, ...], Length(HOLDINGS_LIMIT)] = ()
    linked: Annotated[frozenset[Id], Length(HOLDINGS_LIMIT)] = frozenset()
    memory: MemoryBudgets = NO_MEMORY
    taken_bytes: Bytes = 0
    speeds: Annotated[tuple[Speed, ...], Length(HOLDINGS_LIMIT)] = ()
    measured: Mapping[str, Any] | None = field(default=None, hash=False)
    logged: Annotated[ReplayWindow | None, Row()] = None
    compute: ComputeKind = PROCESSOR
