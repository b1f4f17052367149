"""What a holder's way to a new epoch hears, and what it says must be done."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.recovery.choose_version import Choice, Forward
from p2ptrain.recovery.cores.worker_events import PrepareFailed
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.generation_request import NoWay
from p2ptrain.recovery.placement import Placed, PlacedStage
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import Inventory


@dataclass(frozen=True, slots=True)
class InventoryIn:
    """A device's answer."""

    epoch: int
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class InventoryFailed:
    """A device does not answer, or refuses."""

    epoch: int
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's answer."""

    epoch: int
    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True, slots=True)
class NotPlanned:
    """No plan fits; `reason` is for people."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadyIn:
    """A device is ready, or says what was in the way."""

    epoch: int
    device: str
    trouble: PrepareFailed | None = None


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A device is dead."""

    device: str


ChangeEvent: TypeAlias = InventoryIn | InventoryFailed | Planned | NotPlanned | ReadyIn | MemberGone


@dataclass(frozen=True, slots=True)
class AskInventory:
    """Ask `device`; where they are given, it applies `forward` or does `rebuild` first."""

    device: str
    epoch: int
    forward: Forward | None = None
    rebuild: Rebuild | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Have `device` fetch every unit and build nothing; say `ReadyIn`.

    Attributes:
        placed: the attempt's epoch, with all units in one stage on that device.
    """

    device: str
    placed: Placed
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan for these devices, in the background; say `Planned`.

    Attributes:
        devices: that may get work.
        left_out: by device, the peers that it has no link to.
        present: keep this plan as it is, because nothing speaks against it; None = plan anew.
    """

    epoch: int
    choice: Choice
    devices: frozenset[str]
    left_out: Mapping[str, tuple[str, ...]] = dataclasses.field(hash=False)
    lowered: Mapping[str, int] = dataclasses.field(hash=False)
    present: Placed | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have `device` fetch and build."""

    device: str
    placed: Placed
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class EpochReady:
    """Every device of the plan is ready."""

    number: int
    placed: Placed
    choice: Choice


ChangeInstruction: TypeAlias = AskInventory | Gather | MakePlan | Prepare | EpochReady | NoWay
