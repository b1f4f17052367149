"""What a holder needs for its next generation, and the reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.generation_request import GenerationRequest
from p2ptrain.recovery.snapshot_schedule import SnapshotCost
from p2ptrain.recovery.watch.profile_corrections import ExpectedSeconds, ProfileCorrections


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """The plan that a job runs by: the assignment, and `p2ptrain.plan/1`."""

    assignment: Assignment
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReconfigureRequest:
    """A request: `ask.present` is always that of `in_force`.

    Attributes:
        corrections: what training has shown of the profiles.
        proposed: what was found for this change while training went on; None = to be found now.
        given: the plan to begin with, from the user; None = it is to be found.
        wants_expected: the holder was started again, and does not know what to expect of the plan
            in force, nor what its copies cost.
    """

    planning: JobPlanRequest
    ask: GenerationRequest
    in_force: PlanInForce | None
    recovery: ReplanMethod = ReplanMethod.LIGHT
    corrections: ProfileCorrections = field(default_factory=ProfileCorrections)
    proposed: Plan | None = None
    given: Plan | None = None
    wants_expected: bool = False


@dataclass(frozen=True, slots=True)
class ReconfigureReply:
    """Every device of the assignment is ready.

    Attributes:
        plan: `p2ptrain.plan/1`, nothing beside it.
        changes_results: how results differ from one device's.
        kinds: what devices of several kinds change, see `alike.mixed_kinds`.
        beside_bytes: by device name, what the job takes there beside the plan's peak.
        planning_seconds: what the plan took to make.
        moved_bytes: what all devices together fetched of others to be ready.
        expected: what a round should take each stage on each device; of a plan that stays only
            where the holder wants to know.
        copy_cost: of one kept version, known as `expected`; None too where nothing is kept.
        warnings: for the user, shortcomings of the plan.
        alone: by device name, the samples/s that it would do alone; empty = it is the one before.
        considered: ids of the devices that the plan was chosen from; empty = it is the one before.
    """

    assignment: Assignment
    plan: Mapping[str, Any]
    choice: VersionChoice
    changes_results: tuple[str, ...]
    beside_bytes: Mapping[str, int]
    planning_seconds: float
    moved_bytes: int = 0
    expected: Mapping[Seat, ExpectedSeconds] = field(default_factory=dict)
    copy_cost: SnapshotCost | None = None
    warnings: tuple[str, ...] = ()
    considered: frozenset[str] = frozenset()
    kinds: tuple[str, ...] = ()
    alone: Mapping[str, float] = field(default_factory=dict)
