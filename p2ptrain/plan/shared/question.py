"""What every planner takes and gives, so that the registry can treat them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from p2ptrain.plan.allocation import EVERY_ALLOCATION, Allocation
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.request import Schedule
from p2ptrain.plan.shared.judge import Judge
from p2ptrain.plan.split import BatchSplit


@dataclass(frozen=True, slots=True)
class Question:
    """A request, resolved against a profile and a cluster.

    Attributes:
        splits: the micro-batch sizes to consider, smallest first.
        devices: indexes that may be used, in order of their names.
        required: devices that must have a part.
        caps: by device, the largest part of the round's work it may take.
        groups: whether a stage may have several devices.
        allocations: how these may divide its work.
        effort: part of the usual search budget that may be spent.
        schedule: how backwards may be scheduled.
        least_piece: fewest samples of a micro-batch, the ragged last one included, where sizes
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
    least_piece: int | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def cost(self) -> CostModel:
        """The judge's cost model."""
        return self.judge.cost


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
