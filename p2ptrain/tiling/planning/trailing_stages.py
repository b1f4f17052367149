"""What devices without tiles may do behind them: a straight pipeline, or one stage that they share.

A pipeline is the best one of all these devices (`plan/problem/partition.py`). Where they share one
stage, they divide each micro-batch by samples, or take whole ones in turn, by their speeds
(`plan/search/shares.py`); with a single micro-batch only dividing it gives all of them work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup
from p2ptrain.plan.cost.workload_share import WorkloadShare
from p2ptrain.plan.problem.partition import Partition, Suffix, every_subset
from p2ptrain.plan.problem.question import Constraints
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.batch_split import BatchSplit
from p2ptrain.tiling.planning.tiled_pipeline import TrailingPipeline, place_seconds

MAX_IN_A_ROW = 2

MAX_SHARING = 4


@dataclass(frozen=True)  # without slots: it keeps what it has computed
class TrailingStages:
    """See the module.

    Attributes:
        devices: all of them have a part.
        allocations: how they may share a stage.
    """

    cost: CostModel
    split: BatchSplit
    devices: tuple[int, ...]
    allocations: frozenset[Allocation]

    @property
    def are_worth_asking(self) -> bool:
        """Whether there is any way for them to save time."""
        return self._may_be_a_row or bool(self._ways)

    def rows(self, first: int) -> list[TrailingPipeline]:
        """Ways to compute units `first` to the last that memory may allow; the pipeline first."""
        found = []
        if self._may_be_a_row:
            borders, devices = self._suffix(first).placement(first)
            found.append(TrailingPipeline.straight(self.split, borders, devices))
        groups = self._groups(first)
        return found + [
            TrailingPipeline((first, self.cost.unit_count), (group,)) for group in groups
        ]

    def least_seconds(self, first: int) -> float:
        """What they take for a mini-batch, whichever way; of the pipeline about that."""
        units = first, self.cost.unit_count
        shared = [
            max(
                place_seconds(self.cost, self.split, group, place, units)
                for place in range(len(group.devices))
            )
            for group in self._groups(first)
        ]
        straight = float(self._suffix(first).value[first]) if self._may_be_a_row else inf
        return min(straight, *shared, inf)

    @property
    def _may_be_a_row(self) -> bool:
        """Tiles and stages compute side by side only where there are several micro-batches."""
        return self.split.micro_batches > 1 and len(self.devices) <= MAX_IN_A_ROW

    @property
    def _ways(self) -> Sequence[Allocation]:
        """To share a stage."""
        ways = [Allocation.SAMPLES, Allocation.MICRO_BATCHES]
        return [way for way in ways if way in self.allocations and self._has_enough(way)]

    def _has_enough(self, way: Allocation) -> bool:
        """Something for each; shares of whole micro-batches need several, as a row does."""
        split = self.split
        pieces = split.micro_batch if way is Allocation.SAMPLES else split.micro_batches
        return 2 <= len(self.devices) <= min(MAX_SHARING, pieces)

    def _groups(self, first: int) -> list[StageGroup]:
        """All of them in one stage, each way that memory allows."""
        units, key = (first, self.cost.unit_count), (self.split, self.devices)
        found = [
            self._divider.samples(*key, units)
            if way is Allocation.SAMPLES
            else self._divider.micro_batches(*key, units)
            for way in self._ways
        ]
        return [group for group in found if group is not None]

    @cached_property
    def _divider(self) -> ShareDivider:
        rules = Constraints(
            self.cost.holder, WorkloadShare(self.cost.profile), allocations=self.allocations
        )
        return ShareDivider(self.cost, rules)

    @cached_property
    def _suffixes(self) -> Sequence[Suffix]:
        """Pipelines of all devices, by head."""
        found = list(every_subset(Partition(self.cost, self.split), self.devices))
        return found[-len(self.devices) :]

    def _suffix(self, first: int) -> Suffix:
        return min(self._suffixes, key=lambda suffix: suffix.value[first])
