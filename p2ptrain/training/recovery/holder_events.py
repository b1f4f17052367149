"""What a holder hears while its job runs, and what it says must be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from p2ptrain.training.recovery.change import ChangeAsk, Reason
from p2ptrain.training.recovery.choose import Choice, GlobalCopy, Lost
from p2ptrain.training.recovery.lineage import Lineage
from p2ptrain.training.recovery.placed import Placed
from p2ptrain.training.recovery.version import Version

# -- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Appeared:
    """A device is alive, perhaps again; the holder has a link to it."""

    device: str


@dataclass(frozen=True, slots=True)
class Died:
    """A device is dead.

    Attributes:
        certain: its process ended, so what it had is gone; else it may only be out of reach.
    """

    device: str
    certain: bool


@dataclass(frozen=True, slots=True)
class LinkTrouble:
    """The link between two devices broke; what was queued on it is lost."""

    one: str
    other: str


@dataclass(frozen=True, slots=True)
class LinkBack:
    """The link between two devices is there again."""

    one: str
    other: str


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """A device of the plan ran out of memory.

    Attributes:
        memory_bytes: what it has, as far as is known now.
    """

    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class BrokeOff:
    """A round cannot go on: something was out of reach; signs that tell what may follow."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nothing has moved anywhere for a long time.

    Attributes:
        devices: those that had not finished what was ordered.
    """

    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Committed:
    """`step` updates count: decided, written down and reported."""

    step: int


@dataclass(frozen=True, slots=True)
class Stable:
    """Every copy that `version` needs to be whole without any one device is acknowledged.

    Attributes:
        besides: versions that somebody still reads.
    """

    version: Version
    besides: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True)
class CopiesAre:
    """The whole copies that training could go on from."""

    copies: tuple[GlobalCopy, ...]


@dataclass(frozen=True, slots=True)
class Coordinates:
    """This household's coordinator; None = there is none at present."""

    device: str | None
    term: int


@dataclass(frozen=True, slots=True)
class AnswerIn:
    """A coordinator's answer to request `number`: all devices of `placed` are ready."""

    number: int
    placed: Placed
    choice: Choice


@dataclass(frozen=True, slots=True)
class RefusedIn:
    """A coordinator sees no way; see `RefuseHolder`.

    Attributes:
        again: it may see one soon.
        spoiled: preparations that failed; 0 = nobody could be asked at all.
        lowered: memory in bytes that devices proved to have less of meanwhile, by id.
    """

    number: int
    reason: str
    lost: Lost | None = None
    again: bool = False
    spoiled: int = 0
    lowered: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The coordinator that was asked does not answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A change that can wait for the border of a round.

    Attributes:
        reason: join, leave or drift.
        leaver: the device that leaves.
    """

    reason: Reason
    leaver: str | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """The last round ordered is committed; none is under way."""


@dataclass(frozen=True, slots=True)
class CourseDone:
    """The last step of the job is committed: the weights come home."""


@dataclass(frozen=True, slots=True)
class Home:
    """The weights are home and written."""


HolderEvent: TypeAlias = (
    Appeared
    | Died
    | LinkTrouble
    | LinkBack
    | MemoryShort
    | BrokeOff
    | Stuck
    | Committed
    | Stable
    | CopiesAre
    | Coordinates
    | AnswerIn
    | RefusedIn
    | CallFailed
    | Wanted
    | Drained
    | CourseDone
    | Home
)


# -- instructions --------------------------------------------------------------------------


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
    """Send the request to `coordinator`."""

    coordinator: str
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
    """Tell all living members which versions are to be kept."""

    versions: tuple[Version, ...]
    alive: frozenset[str]


@dataclass(frozen=True, slots=True)
class Failure:
    """Tell people that a device of the plan died."""

    device: str


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Tell people for which devices the job waits; none = for a coordinator."""

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
    | StopJob
)
