"""Groups whose shares make the slowest device as fast as possible.

Asteroid's algorithm 1 (section 3.4) starts from capacities at one size and then moves blocks;
times are not proportional to samples here, so shares are dealt out one step at a time to the device
that would finish it first, which is the optimum for times that grow with the share.

Shares by computing time alone would give a fast device behind a slow link more than that link can
carry. Devices compute and communicate at once, so a device's round takes the longer of the two.

`Drafter` makes drafts that fit and are allowed of a layout: borders, and stages of which some are
only devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import (
    Draft,
    StageGroup,
    UnplacedGroup,
    alone,
    draft_groups,
    usual_depths,
)
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.structure_moves import Stage
from p2ptrain.plan.types.allocation import BatchSplit, hand_out

Floats: TypeAlias = NDArray[np.float64]

FINE = 64
"""Up to so many samples or micro-batches are dealt out one by one."""


class ShareDivider:
    """Groups for the stages of one question that obey its caps; keeps what it has computed."""

    def __init__(self, question: Question) -> None:
        self.cost, self._question = question.cost, question
        self._groups: dict[
            tuple[BatchSplit, UnplacedGroup, tuple[int, int], int], StageGroup | None
        ] = {}
        self._exchanges: dict[frozenset[int], dict[int, SampleExchange]] = {}

    def group(
        self, split: BatchSplit, part: UnplacedGroup, units: tuple[int, int], depth: int = 1
    ) -> StageGroup | None:
        """`part` sharing units by speed: a device alone takes all.

        Args:
            depth: micro-batches that memory must hold at once where samples are divided.

        Returns:
            None where it does not hold them, or there is less to share than devices.
        """
        key = split, part, units, depth
        if key not in self._groups:
            self._groups[key] = self._shared(split, part, units, depth)
        return self._groups[key]

    def _shared(
        self, split: BatchSplit, part: UnplacedGroup, units: tuple[int, int], depth: int
    ) -> StageGroup | None:
        devices = part.devices
        if len(devices) == 1:
            return alone(split, devices[0])
        links = self._link_seconds(devices, units)
        total = split.micro_batches if part.deals else split.micro_batch
        most = self._allowed(split, devices, units, total)
        if part.deals:
            each = [
                self._seconds(place, devices, units, links, split.first_samples)
                for place in range(len(devices))
            ]
            shares = even_out(total, most, lambda place, n: n * each[place])
        else:
            per_sample = split.in_flight_samples(depth) / split.first_samples
            room = [
                int(self.cost.samples_that_fit(*units, memory) / per_sample)
                for memory in (self.cost.devices[device].memory_bytes for device in devices)
            ]
            shares = even_out(
                total,
                list(map(min, room, most)),
                lambda place, n: self._seconds(place, devices, units, links, n),
            )
        return None if shares is None else StageGroup(devices, shares, part.allocation)

    def _seconds(
        self,
        place: int,
        devices: tuple[int, ...],
        units: tuple[int, int],
        links: Sequence[float],
        samples: int,
    ) -> float:
        """Of so many samples, computed and carried at once."""
        computing = sum(self.cost.stage_seconds(devices[place], *units, samples))
        return max(computing, samples * links[place])

    def _link_seconds(self, devices: tuple[int, ...], units: tuple[int, int]) -> list[float]:
        """Seconds a sample that each device's links are busy at least."""
        key = frozenset(devices)
        if key not in self._exchanges:
            self._exchanges[key] = exchanges(self.cost, key)
        known = self._exchanges[key]
        return [known[device].seconds(*units) for device in devices]

    def _allowed(
        self, split: BatchSplit, devices: tuple[int, ...], units: tuple[int, int], total: int
    ) -> list[int]:
        """The largest share of `total` that each device's cap allows."""
        if not self._question.caps:
            return [total] * len(devices)
        work = self._question.work.units(*units, split.first_samples)
        parts = [self._question.most_part(device) for device in devices]
        return [total if work <= part else int(total * part / work) for part in parts]


def even_out(
    total: int, most: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[int, ...] | None:
    """Shares from 1 to `most` that sum to `total` and make the largest of `seconds` small.

    `seconds(place, share)` grows with the share. None where no such shares exist.
    """
    if len(most) > total or min(most) < 1 or sum(most) < total:
        return None
    return hand_out(total, _head_start(total, most, seconds), most, seconds)


def _head_start(total: int, most: Sequence[int], seconds: Callable[[int, int], float]) -> list[int]:
    """Shares surely not too large: 1 each, or of many most of what the speeds suggest."""
    ones = [1] * len(most)
    if total <= FINE:
        return ones
    speeds = [1 / max(seconds(place, total), 1e-300) for place in range(len(most))]
    sure = [int(0.75 * total * speed / sum(speeds)) for speed in speeds]
    shares = [max(1, min(part, limit)) for part, limit in zip(sure, most, strict=True)]
    return shares if sum(shares) <= total else ones


@dataclass(frozen=True, slots=True, eq=False)
class SampleExchange:
    """Seconds a sample of one device over its fastest links, by the stage's first and last border.

    Attributes:
        received, sent: [2, L+1] occupation of its downlink and its uplink: row 0 by the border in
            front of the stage, row 1 by the one behind.
    """

    received: Floats
    sent: Floats

    def seconds(self, first: int, end: int) -> float:
        """Of a stage of units [first, end)."""
        received = self.received[0, first] + self.received[1, end]
        return float(max(received, self.sent[0, first] + self.sent[1, end]))


def exchanges(cost: CostModel, devices: Collection[int]) -> dict[int, SampleExchange]:
    """Of each device of a group."""
    profile, count, rates = cost.profile, cost.unit_count, cost.links.rates
    carried = np.array([0.0, *(unit.output_bytes for unit in profile.units[:-1]), 0.0])
    outside = [other for other in range(len(cost.devices)) if other not in devices]
    found = {}
    for device in devices:
        received, sent = np.zeros((2, count + 1)), np.zeros((2, count + 1))
        if outside:
            received[:] = carried / rates[outside, device].max()
            sent[:] = carried / rates[device, outside].max()
        if device != cost.holder:
            fed = rates[cost.holder, device]
            received[0, 0] = profile.input_bytes / fed
            received[1, count] = profile.target_bytes / fed
        found[device] = SampleExchange(received, sent)
    return found


class Drafter:
    """Drafts layouts that a question allows; another judge than its own may judge them."""

    def __init__(self, question: Question, judge: Judge | None = None) -> None:
        self.question, self.judge = question, judge or question.judge
        self._divider = ShareDivider(question)

    def drafts(
        self, split: BatchSplit, borders: Sequence[int], stages: Sequence[Stage]
    ) -> Iterator[Draft]:
        """With usual depths, and deeper ones where those may be faster by the bound."""
        for draft in self.usual(split, borders, stages):
            yield draft
            yield from self.judge.deepened(draft)

    def usual(
        self, split: BatchSplit, borders: Sequence[int], stages: Sequence[Stage]
    ) -> Iterator[Draft]:
        """Shares by speed, and where memory makes that shallow shares that leave it room."""
        shallow = self.drafted(split, borders, stages, (1,) * len(stages))
        if shallow is None:
            return
        drafts = [shallow]
        usual = usual_depths(shallow.groups, split.micro_batches)
        if shallow.warmup != usual:
            drafts += [
                draft
                for depths in (usual, tuple(max(1, depth // 2) for depth in usual))
                if (draft := self.drafted(split, borders, stages, depths)) is not None
            ]
        for draft in dict.fromkeys(drafts):
            if self.question.allow(draft):
                yield draft

    def resized(self, draft: Draft, split: BatchSplit) -> Iterator[Draft]:
        """The same structure with micro-batches of another size."""
        kinds = [UnplacedGroup(group.devices, group.allocation) for group in draft.groups]
        return self.drafts(split, draft.borders, kinds)

    def drafted(
        self,
        split: BatchSplit,
        borders: Sequence[int],
        stages: Sequence[Stage],
        depths: Sequence[int],
        wanted: Sequence[int] | None = None,
    ) -> Draft | None:
        """With shares that leave memory for `depths`; `wanted` as for `draft_groups`.

        None where nothing fits.
        """
        groups: list[StageGroup] = []
        for stage, units, depth in zip(stages, pairwise(borders), depths, strict=True):
            group: StageGroup | None = (
                stage
                if isinstance(stage, StageGroup)
                else self._divider.group(split, stage, units, depth)
            )
            if group is None:
                return None
            groups.append(group)
        return draft_groups(self.judge.cost, split, borders, groups, wanted)
