"""Shares of a group that let its devices finish together, in whole samples or micro-batches.

Times are not linear in samples, so shares proportional to a speed (Asteroid, algorithm 1, phase 1)
leave some devices waiting. Here the finishing time itself is bisected: the most samples each device
computes within T seconds and its memory, until they would exceed the micro-batch; what is left
over goes, one by one, to the device that then finishes first. That is the least finishing time
where a device is never faster with more samples.

`UnplacedGroup` is the devices of a stage before it is known which units it has. `Drafter` makes
drafts that fit and obey the rules of a layout: borders, and stages of which some are only kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone, draft_groups, usual_depths
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.search.structure_moves import GroupKind, Stage
from p2ptrain.plan.types.allocation import Allocation, BatchSplit, hand_out

BISECTIONS = 25
"""Halvings of the interval of finishing times; a remainder of a few samples is handed out."""


def balanced_group(
    cost: CostModel,
    split: BatchSplit,
    units: tuple[int, int],
    devices: Sequence[int],
    allocation: Allocation = Allocation.SAMPLES,
    depth: int = 1,
) -> StageGroup | None:
    """`devices` sharing units [first, end), each with at least one sample or micro-batch.

    Arguments:
        depth: micro-batches that must fit into memory at once where samples are divided; with
            whole micro-batches every device must hold one.

    Returns:
        None where memory does not allow it, there are more devices than there is to share, or they
        compute with different things.
    """
    if len(devices) == 1:
        return alone(split, devices[0])
    if not cost.may_share(devices):
        return None
    if allocation is Allocation.MICRO_BATCHES:
        shares = _dealt(cost, split, units, devices)
    else:
        shares = _divided(cost, split, units, devices, depth)
    return None if shares is None else StageGroup(tuple(devices), shares, allocation)


def _dealt(
    cost: CostModel, split: BatchSplit, units: tuple[int, int], devices: Sequence[int]
) -> tuple[int, ...] | None:
    """Whole micro-batches of a round by device."""
    samples, count = split.first_samples, split.micro_batches
    if min(_room(cost, units, devices)) < samples or len(devices) > count:
        return None
    each = [sum(cost.stage_seconds(device, *units, samples)) for device in devices]
    return hand_out(
        count, [1] * len(devices), [count] * len(devices), lambda i, share: share * each[i]
    )


def _divided(
    cost: CostModel,
    split: BatchSplit,
    units: tuple[int, int],
    devices: Sequence[int],
    depth: int,
) -> tuple[int, ...] | None:
    """Samples of a micro-batch by device."""
    samples = split.first_samples
    most = [min(room // depth, samples) for room in _room(cost, units, devices)]
    if min(most) < 1 or len(devices) > samples or sum(most) < samples:
        return None
    curves = [_Curve(cost, device, units) for device in devices]
    low, high = 0.0, max(curve.seconds(samples) for curve in curves)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        within = sum(map(_Curve.samples, curves, [middle] * len(curves), most))
        low, high = (middle, high) if within <= samples else (low, middle)
    shares = [curve.samples(low, top) for curve, top in zip(curves, most, strict=True)]
    return hand_out(samples, shares, most, lambda i, share: curves[i].seconds(share))


def _room(cost: CostModel, units: tuple[int, int], devices: Sequence[int]) -> list[int]:
    """Samples that may be in flight on each device."""
    return [cost.samples_that_fit(*units, cost.devices[d].memory_bytes) for d in devices]


class _Curve:
    """One device's seconds over samples for some units, and the way back."""

    def __init__(self, cost: CostModel, device: int, units: tuple[int, int]) -> None:
        self._cost, self._device, self._units = cost, device, units
        sizes = (cost.devices[device].times or cost.profile.times).sizes
        measured = [self.seconds(size) for size in sizes]
        # Below the smallest size a line to zero, but at least half of the smallest's time.
        self._samples = np.array([sizes[0] / 2, *sizes])
        self._seconds = np.maximum.accumulate([measured[0] / 2, *measured])

    def seconds(self, samples: int) -> float:
        """Forward and backward of that many samples."""
        return sum(self._cost.stage_seconds(self._device, *self._units, samples))

    def samples(self, seconds: float, most: int) -> int:
        """About the most samples within `seconds`; at least 1 and at most `most`."""
        if seconds > self._seconds[-1]:
            within = seconds / self._seconds[-1] * self._samples[-1]
        elif seconds < self._seconds[0]:
            return 1
        else:
            within = np.interp(seconds, self._seconds, self._samples)
        return max(1, min(int(within), most))


@dataclass(frozen=True, slots=True)
class UnplacedGroup:
    """Devices of one stage, in the order of their sample ranges."""

    devices: tuple[int, ...]
    allocation: Allocation = Allocation.SAMPLES


def shared_by_speed(cost: CostModel, split: BatchSplit, part: UnplacedGroup) -> StageGroup | None:
    """Shares in proportion to speed on the whole model, whatever memory says.

    None where there are more devices than there is to share.
    """
    if len(part.devices) == 1:
        return alone(split, part.devices[0])
    deals = part.allocation is Allocation.MICRO_BATCHES
    total = split.micro_batches if deals else split.micro_batch
    if total < len(part.devices):
        return None
    whole = (0, cost.unit_count, split.first_samples)
    speeds = [1 / max(sum(cost.stage_seconds(d, *whole)), 1e-300) for d in part.devices]
    return StageGroup(part.devices, _proportional(speeds, total), part.allocation)


def balanced(
    cost: CostModel, split: BatchSplit, part: UnplacedGroup, units: tuple[int, int], depth: int
) -> StageGroup | None:
    """Shares for those units within memory, at the depth wanted or at a depth of one."""
    group = balanced_group(cost, split, units, part.devices, part.allocation, depth)
    return group or balanced_group(cost, split, units, part.devices, part.allocation)


def _proportional(speeds: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole shares of at least 1 that sum to `total`; the largest remainders are rounded up."""
    spare = total - len(speeds)
    exact = [spare * speed / sum(speeds) for speed in speeds]
    shares = [1 + int(part) for part in exact]
    by_rest = sorted(range(len(speeds)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_rest[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


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
