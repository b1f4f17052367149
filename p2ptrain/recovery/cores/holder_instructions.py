"""What a holder's part in recovery says must be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.recovery.choose_version import Choice, Lost
from p2ptrain.recovery.generation_request import ChangeAsk, Reason
from p2ptrain.recovery.placement import Placed
from p2ptrain.recovery.version import Lineage, Version


@dataclass(frozen=True, slots=True)
class Freeze:
    """Order nothing more, decide nothing more: cancel the rounds under way and their feeding."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Order no new round; say `Drained` once the last one is committed."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Write this down, synced, before the next instruction.

    Attributes:
        next_epoch: first number that was never used.
        placed: the plan in force, None before the first.
        stable: newest version of which every copy was acknowledged.
        took_part: devices that had a part in an epoch of the lineage, each with its last one.
    """

    next_epoch: int
    lineage: Lineage
    placed: Placed | None
    stable: Version | None = None
    took_part: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """Have it made ready; say `AnswerIn` or `RefusedIn`."""

    ask: ChangeAsk


@dataclass(frozen=True, slots=True)
class Begin:
    """Tell all living members that the epoch is in force, then order rounds from its version on."""

    placed: Placed
    choice: Choice
    reason: Reason
    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeepOnly:
    """Tell all living members which versions are to be kept, the stable one first."""

    versions: tuple[Version, ...]
    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class Failure:
    """Tell people that a device of the plan died."""

    device: str


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Tell people for which devices the job waits."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LetGo:
    """A device that wanted to leave may: nothing depends on it any more."""

    device: str


@dataclass(frozen=True, slots=True)
class StayOn:
    """Tell a device that wanted to leave that the others cannot do without it, and why."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class BringHome:
    """Read the weights from the devices that have them."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class PartEnds:
    """Tell people that units [first, end) have ended these devices; and end the job."""

    first: int
    end: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopJob:
    """End it. `reason` None = it is done; else for people."""

    reason: str | None = None
    lost: Lost | None = None


HolderInstruction: TypeAlias = (
    Freeze
    | Drain
    | Journal
    | Ask
    | Begin
    | KeepOnly
    | Failure
    | WaitFor
    | LetGo
    | StayOn
    | BringHome
    | PartEnds
    | StopJob
)
