"""Events and instructions of the holder's way to a new generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.choose_version import RollForward, VersionChoice
from p2ptrain.recovery.cores.worker_events import PrepareFailed
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import ReconfigureFailure
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import StateReport


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    """What becomes of the attempt with that number."""

    generation: int


class OwnChangeInstruction:
    """What is to be done for an attempt."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StateReported(AttemptEvent):
    """A device's answer."""

    inventory: StateReport


@dataclass(frozen=True, slots=True)
class StateReportFailed(AttemptEvent):
    """A device does not answer, or refuses."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlanMade(AttemptEvent):
    """The planner's answer."""

    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True, slots=True)
class PlanFailed(AttemptEvent):
    """No plan fits; `reason` is for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeviceReady(AttemptEvent):
    """A device is ready, or says what was in the way."""

    device: str
    trouble: PrepareFailed | None = None


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A device is dead."""

    device: str


@dataclass(frozen=True, slots=True)
class AskStateReport(OwnChangeInstruction):
    """Ask `device`; where they are given, it applies `forward` or does `rebuild` first."""

    device: str
    generation: int
    forward: RollForward | None = None
    rebuild: Rebuild | None = None


@dataclass(frozen=True, slots=True)
class GatherUnits(OwnChangeInstruction):
    """Have `device` fetch every unit and build nothing; say `DeviceReady`.

    Attributes:
        placed: the attempt's generation, with all units in one stage on that device.
    """

    device: str
    placed: Placement
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class MakePlan(OwnChangeInstruction):
    """Plan for these devices, in the background; say `PlanMade`.

    Attributes:
        devices: that may get work.
        left_out: by device, the peers that it has no link to.
        present: keep this plan as it is, because nothing speaks against it; None = a new plan.
    """

    generation: int
    choice: VersionChoice
    devices: frozenset[str]
    left_out: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)
    lowered: Mapping[str, MemoryBudgets] = dataclasses.field(hash=False)
    present: Placement | None = None


@dataclass(frozen=True, slots=True)
class PrepareDevice(OwnChangeInstruction):
    """Have `device` fetch and build."""

    device: str
    placed: Placement
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class ReconfigurationReady(OwnChangeInstruction):
    """Every device of the plan is ready."""

    number: int
    placed: Placement
    choice: VersionChoice


ChangeEvent: TypeAlias = AttemptEvent | MemberGone

ChangeInstruction: TypeAlias = OwnChangeInstruction | ReconfigureFailure
