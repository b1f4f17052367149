"""What every planner takes and gives, so that the registry can treat them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from p2ptrain.plan.cost.check_plan import ROUNDING, WorkloadShare
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, BatchSplit
from p2ptrain.plan.types.request import Schedule

MANY_DEVICES = 16
"""Of more, a bound costs nearly what a simulation does, and values of orders say little."""


@dataclass(frozen=True)  # without slots: it keeps its `work`
class Question:
    """A request, resolved against a profile and a cluster, and what a plan must obey.

    Attributes:
        splits: the micro-batch sizes to consider, smallest first.
        devices: indexes that may be used, in order of their names.
        private: the holder, and only it, has the first and the last stage.
        required: devices that must have a part.
        caps: by device, the largest part of the round's work it may take.
        groups: whether a stage may have several devices.
        allocations: how these may divide its work.
        effort: part of the usual search budget that may be spent.
        schedule: how backwards may be scheduled.
        min_micro_batch: fewest samples of a micro-batch, the ragged last one included, where sizes
            beyond `splits` may be chosen; None = they may not.
    """

    judge: Judge
    splits: Sequence[BatchSplit]
    devices: tuple[int, ...]
    private: bool = False
    required: frozenset[int] = frozenset()
    caps: Mapping[int, float] = field(default_factory=dict)
    groups: bool = True
    allocations: frozenset[Allocation] = EVERY_ALLOCATION
    effort: float = 1.0
    min_micro_batch: int | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def cost(self) -> CostModel:
        """The judge's cost model."""
        return self.judge.cost

    @property
    def is_wide(self) -> bool:
        """Whether there are many devices."""
        return len(self.devices) > MANY_DEVICES

    @cached_property
    def work(self) -> WorkloadShare:
        """Measures parts of the round's work."""
        return WorkloadShare(self.cost.profile)

    def allow(self, draft: Draft) -> bool:
        """Whether `draft` obeys."""
        if not self.required <= frozenset(draft.devices):
            return False
        if not all(len(g.devices) == 1 or self.permit(deals=g.deals) for g in draft.groups):
            return False
        if self.private and not self._at_home(draft):
            return False
        if not self.caps:
            return True
        parts = self.work.parts(draft)
        return all(parts.get(device, 0.0) <= cap + ROUNDING for device, cap in self.caps.items())

    def permit(self, *, deals: bool) -> bool:
        """Whether groups may deal whole micro-batches, or else divide samples."""
        wanted = Allocation.MICRO_BATCHES if deals else Allocation.SAMPLES
        return self.groups and wanted in self.allocations

    def most_part(self, device: int) -> float:
        """The largest part of the round's work that it may take."""
        return self.caps.get(device, 1.0) + ROUNDING

    def pinned(self, stages: int) -> frozenset[int]:
        """Stages that are the holder's alone."""
        return frozenset((0, stages - 1)) if self.private else frozenset()

    def _at_home(self, draft: Draft) -> bool:
        ends = (draft.groups[0].devices, draft.groups[-1].devices)
        return ends == ((self.cost.holder,), (self.cost.holder,))


@dataclass(frozen=True, slots=True)
class Answer:
    """A planner's decision.

    Attributes:
        reasons: why a device of the question is in no stage, by index.
        found_by: where the planner asked others, whose draft this is.
    """

    draft: Draft
    reasons: Mapping[int, str]
    found_by: str | None = None


Planner: TypeAlias = Callable[[Question], Answer]
"""Raises PlanError where nothing fits."""
