"""Events of the holder's recovery core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.generation_request import ReconfigureFailure, ReconfigureReason
from p2ptrain.recovery.placement import Placement
from p2ptrain.recovery.version import Version


class OwnHolderEvent:
    """What happens to a job, as its holder sees it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AboutMember(OwnHolderEvent):
    """What becomes of a device."""

    device: str


class AboutCourse(OwnHolderEvent):
    """What is no trouble."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class MemberAppeared(AboutMember):
    """A device is alive, perhaps again; the holder has a link to it."""


@dataclass(frozen=True, slots=True)
class MemberDied(AboutMember):
    """A device is dead.

    Attributes:
        certain: its process ended, so what it had is gone; else it may only be out of reach.
        left: it said so before.
    """

    certain: bool
    left: bool = False


@dataclass(frozen=True, slots=True)
class LinkBroken(OwnHolderEvent):
    """The link between two devices broke; what was queued on it is lost."""

    one: str
    other: str


@dataclass(frozen=True, slots=True)
class LinkRestored(OwnHolderEvent):
    """The link between two devices is there again."""

    one: str
    other: str


@dataclass(frozen=True, slots=True)
class DeviceOutOfMemory(OwnHolderEvent):
    """A device of the plan ran out of memory.

    Attributes:
        memory: what it has, as far as is known now.
    """

    device: str
    memory: MemoryBudgets


@dataclass(frozen=True, slots=True)
class RoundInterrupted(OwnHolderEvent):
    """A round cannot go on: something was out of reach; signs of the cause may follow."""

    reason: str


@dataclass(frozen=True, slots=True)
class RoundStalled(OwnHolderEvent):
    """Nothing has moved anywhere for a long time.

    Attributes:
        devices: those that had not finished what was ordered.
    """

    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Faulty(OwnHolderEvent):
    """A device sends what it should not, or nothing: it gets no work any more in this job.

    Attributes:
        device: None = no device is to blame, and a plan is to be made at once all the same.
        cleared: devices that were thought so and are not.
    """

    device: str | None
    cleared: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StepCommitted(OwnHolderEvent):
    """`step` updates count: decided, written down and reported."""

    step: int


@dataclass(frozen=True, slots=True)
class SnapshotStable(OwnHolderEvent):
    """Every copy that `version` needs to be whole without any one device is acknowledged.

    Attributes:
        besides: versions that a device still reads.
    """

    version: Version
    besides: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationReady(OwnHolderEvent):
    """What came of request `number`: all devices of `placed` are ready."""

    number: int
    placed: Placement
    choice: VersionChoice


@dataclass(frozen=True, slots=True)
class ChangeWanted(AboutCourse):
    """A change that can wait for the border of a round.

    Attributes:
        reason: join, leave or drift.
        leaver: the device that leaves.
    """

    reason: ReconfigureReason
    leaver: str | None = None


@dataclass(frozen=True, slots=True)
class RoundsDrained(AboutCourse):
    """The last round ordered is committed; none is under way."""


@dataclass(frozen=True, slots=True)
class StepsDone(AboutCourse):
    """The last step of the job is committed: the weights come home."""


@dataclass(frozen=True, slots=True)
class WeightsHome(AboutCourse):
    """The weights are home and written."""


HolderEvent: TypeAlias = OwnHolderEvent | ReconfigureFailure
