"""What is asked of the planners.

Whether the devices named exist is checked where a request meets a cluster (`planners.make_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, check_samples
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.weight_versions import Weights


class PlanMode(StrEnum):
    """What is optimised."""

    SYNC = "sync"
    """The time of one synchronous round."""
    ASYNC = "async"
    """The time between mini-batches once the pipeline is full."""


class Schedule(StrEnum):
    """How a stage's backward is scheduled (`plan/types/schedule.py`)."""

    ONE_F_ONE_B = "1f1b"
    """In one piece."""
    ZERO_BUBBLE = "zero-bubble"
    """In two, gradients of inputs and of weights."""
    AUTO = "auto"
    """In two where that is faster."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One question to the planners.

    Attributes:
        batch_size: samples of a mini-batch (one update).
        micro_batch: fixed size; None = the planner chooses.
        planner: a name in `planners.PLANNERS`.
        private: the holder, and only it, has the first and the last stage.
        min_micro_batch: fewest samples that the planner may choose for one, the ragged last
            one included: some layers cannot train on a single sample.
        only: names of the devices a plan may use; None = all. The holder feeds in any case.
        required: names of devices that must have a part.
        caps: by device name, the largest part of the round's work it may take (0 < cap <= 1).
            Work is counted as in `plan/cost/check_plan.py`.
        groups: whether a stage may have several devices.
        allocations: how these may divide its work: where a model looks across samples, dividing
            them changes what it learns, and dealing whole micro-batches does not.
        mode: synchronous rounds, or steady asynchronous running.
        weights: asynchronously, which versions of their weights stages keep.
        full_depths: asynchronously, whether every stage needs memory for its usual depth: with less
            in flight weights are not as many updates old as the number of stages says.
        overlap: judge by what the runtime does, not by the plain cost model.
        updates_ahead: with `overlap`, whether stages update before they know that all are done
            with the round; they cannot where gradients are clipped by the whole model's norm.
        schedule: of backwards; None = AUTO for planner `auto` with `overlap`, else 1F1B.
        effort: part of the usual search that `auto` may spend (0 < effort <= 1), for those who
            wait for the plan on a slow device.
        grid: of planner `tiles`, (rows, columns); None = it chooses.
        groups_of_units: of planner `tiles`: borders of the groups of tiled units, from 0 on; the
            last one ends the tiled part; () = it chooses.

    Raises:
        OptionError: a batch size below 1 or above MAX_SAMPLES, a cap or effort out of range,
            groups that may divide their work in no way, a required device not allowed, split
            backwards in mode async.
    """

    batch_size: int
    micro_batch: int | None = None
    planner: str = "auto"
    private: bool = False
    min_micro_batch: int = 1
    only: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    caps: Mapping[str, float] = field(default_factory=dict)
    groups: bool = True
    allocations: frozenset[Allocation] = EVERY_ALLOCATION
    mode: PlanMode = PlanMode.SYNC
    weights: Weights = Weights.STASHED
    full_depths: bool = False
    overlap: bool = False
    updates_ahead: bool = True
    schedule: Schedule | None = None
    effort: float = 1.0
    grid: tuple[int, int] | None = None
    groups_of_units: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.grid or self.groups_of_units) and self.planner != "tiles":
            raise OptionError(f"grid and groups are for planner tiles, not for {self.planner}")
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, found {self.batch_size}")
        check_samples("batch_size", self.batch_size)
        if not 0 < self.effort <= 1:
            raise OptionError(f"effort must lie above 0 and at most 1, found {self.effort}")
        if self.mode is PlanMode.ASYNC and self.schedule not in (None, Schedule.ONE_F_ONE_B):
            raise OptionError(f"schedule {self.schedule} works with mode sync only")
        if self.groups and not self.allocations:
            raise OptionError("groups must be allowed some way to divide their work, or forbidden")
        for name, cap in sorted(self.caps.items()):
            if not 0 < cap <= 1:
                raise OptionError(f'the cap of "{name}" must lie above 0 and at most 1: {cap}')
        excluded = self.required - self.only if self.only is not None else frozenset()
        for name in sorted(excluded):
            raise OptionError(f"{name} is required, but it is excluded")

    @property
    def wanted_schedule(self) -> Schedule:
        """The schedule asked for, or the default."""
        if self.schedule is not None:
            return self.schedule
        may_split = self.overlap and self.planner == "auto" and self.mode is PlanMode.SYNC
        return Schedule.AUTO if may_split else Schedule.ONE_F_ONE_B


def all_but(cluster: Cluster, excluded: Collection[str]) -> frozenset[str]:
    """The names of the cluster's devices without `excluded`, as a request's `only`.

    The holder may be excluded too: it then has no stage, but feeds the first and the last one.

    Raises:
        OptionError: an excluded name that is not in the cluster.
    """
    for name in excluded:
        cluster.device(name)
    return frozenset(device.name for device in cluster.devices) - frozenset(excluded)
