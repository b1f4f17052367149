"""What the holder's recovery core returns to be done."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.recovery.choose_version import StateLost, VersionChoice
from p2ptrain.recovery.generation_request import GenerationRequest, ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Lineage, Version


class HolderInstruction:
    """What a holder is to do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StopRounds(HolderInstruction):
    """Order nothing more, decide nothing more: cancel the rounds under way and their feeding."""


@dataclass(frozen=True, slots=True)
class DrainRounds(HolderInstruction):
    """Order no new round; say `RoundsDrained` once the last one is committed."""


@dataclass(frozen=True, slots=True)
class WriteJournal(HolderInstruction):
    """Write this down, synced, before the next instruction.

    Attributes:
        next_generation: first number that was never used.
        placed: the plan in force, None before the first.
        stable: newest version of which every copy was acknowledged.
        took_part: devices that had a part in a generation of the lineage, each with its last one.
    """

    next_generation: int
    lineage: Lineage
    placed: Placement | None
    stable: Version | None = None
    took_part: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareGeneration(HolderInstruction):
    """Have it made ready; say `GenerationReady` or `RefusedIn`."""

    ask: GenerationRequest


@dataclass(frozen=True, slots=True)
class BeginGeneration(HolderInstruction):
    """Notify all living members that the generation is in force, then order rounds from its version
    on."""

    placed: Placement
    choice: VersionChoice
    reason: ReconfigureReason
    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class RetainOnly(HolderInstruction):
    """Notify all living members which versions are to be kept, the stable one first."""

    versions: tuple[Version, ...]
    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class ReportFailure(HolderInstruction):
    """Report that a device of the plan died."""

    device: str


@dataclass(frozen=True, slots=True)
class ReportWaiting(HolderInstruction):
    """Report for which devices the job waits."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrantLeave(HolderInstruction):
    """A device that wanted to leave may: nothing depends on it any more."""

    device: str


@dataclass(frozen=True, slots=True)
class DenyLeave(HolderInstruction):
    """Deny the leave of a device, with the reason."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class CollectWeights(HolderInstruction):
    """Read the weights from the devices that have them."""

    placed: Placement


@dataclass(frozen=True, slots=True)
class PartEnds(HolderInstruction):
    """Report that units [first, end) have ended these devices; and end the job."""

    first: int
    end: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopJob(HolderInstruction):
    """End it. `reason` None = it is done; else the user's message."""

    reason: str | None = None
    lost: StateLost | None = None
