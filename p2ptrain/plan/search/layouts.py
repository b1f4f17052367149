"""From a layout (borders, and stages of which some are only kinds) to drafts that fit and obey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups, usual_depths
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.search.structure_moves import GroupKind, Stage
from p2ptrain.plan.types.batch_split import BatchSplit


class Drafter:
    """Drafts layouts for one judge and its question's rules."""

    def __init__(self, judge: Judge, divider: ShareDivider) -> None:
        self.judge, self.divider, self.rules = judge, divider, divider.rules

    def drafts(
        self, split: BatchSplit, borders: Sequence[int], stages: Sequence[Stage]
    ) -> Iterator[Draft]:
        """Shares by speed, and where memory makes that shallow shares that leave it room.

        With usual depths, and deeper ones where those may be faster by the bound.
        """
        shallow = self._drafted(split, borders, stages, (1,) * len(stages))
        if shallow is None:
            return
        drafts = [shallow]
        usual = usual_depths(shallow.groups, split.micro_batches)
        if shallow.warmup != usual:
            drafts += [
                draft
                for depths in (usual, tuple(max(1, depth // 2) for depth in usual))
                if (draft := self._drafted(split, borders, stages, depths)) is not None
            ]
        for draft in dict.fromkeys(drafts):
            if self.rules.allow(draft):
                yield draft
                yield from self.judge.deepened(draft)

    def resized(self, draft: Draft, split: BatchSplit) -> Iterator[Draft]:
        """The same structure with micro-batches of another size."""
        kinds = [GroupKind(group.devices, deals=group.deals) for group in draft.groups]
        return self.drafts(split, draft.borders, kinds)

    def _drafted(
        self,
        split: BatchSplit,
        borders: Sequence[int],
        stages: Sequence[Stage],
        depths: Sequence[int],
    ) -> Draft | None:
        """With shares that leave memory for `depths`; None where nothing fits."""
        groups: list[StageGroup] = []
        for stage, units, depth in zip(stages, pairwise(borders), depths, strict=True):
            group = self._group(split, stage, units, depth)
            if group is None:
                return None
            groups.append(group)
        return draft_groups(self.judge.cost, split, borders, groups)

    def _group(
        self, split: BatchSplit, stage: Stage, units: tuple[int, int], depth: int
    ) -> StageGroup | None:
        if isinstance(stage, GroupKind):
            if stage.deals:
                return self.divider.micro_batches(split, stage.devices, units)
            return self.divider.samples(split, stage.devices, units, depth)
        return stage
