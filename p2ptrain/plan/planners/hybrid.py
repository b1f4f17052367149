"""`hybrid`: Asteroid's planner (section 3.3, Algorithm 2): groups of devices in a pipeline.

Devices are sorted by memory, largest first, and stages take neighbours in that order. Q(l, n, p) is
the least latency of a round of the last l units in p stages on the last n devices; a head stage is
put before the best shorter pipeline. Steps s are stages and the links between them:

    round  = max over s of  Tw_s + Te_s + Ta_s
    Tw_s   = sum of Ef before s                 Ta_s = all-reduce of the stage's group
    Te_s   = M (Ef+Eb) of the dominant step, more before it and less behind it by (Ef+Eb) of the
             steps between; dominant is the step of the largest M (Ef+Eb) so aligned

A pipeline is two numbers: A = Te_0, and R = max over s of (Ta_s - sum of Eb before s); its latency
is A + R. A head stage h over the link c gives

    A' = max( M E_h ,  E_h + max( M E_c ,  E_c + A ) )        R' = max( Ta_h ,  R - Eb_h - Eb_c )

Inside a group Algorithm 1 (`group_shares.py`) divides the samples, with memory for K_p = 2(P-p)-1.
Ef and Eb of a link are the whole tensor over the slowest link between the two groups. Large models
are planned on a coarser grid. Where memory leaves no plan, the depth is given up first, then the
rule that every device has a sample. Where samples may not be divided, micro-batches are dealt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.cost.draft import Draft, StageGroup
from p2ptrain.plan.planners.group_shares import Floats, SampleTimes, Wholes
from p2ptrain.plan.planners.hybrid_grid import Grid, StepTables, make_grid
from p2ptrain.plan.planners.published import (
    Inner,
    dealing_by_speed,
    fastest,
    inner_part,
    refuse_groups,
    refuse_short_models,
)
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judged
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.types.allocation import Allocation, BatchSplit

EXACT_UNITS, EXACT_DEVICES = 24, 8
"""No grid up to here."""

FINE = ((8, 24, 8), (64, 24, 32), (10**9, 24, 16))
"""(most devices, blocks, steps) of the grid beyond."""

ROUGH = 8
"""Blocks and steps of the grid on which the micro-batch sizes of large questions are compared."""

PROMISING = 2
"""Sizes that are then planned on the fine grid."""


def plan_hybrid(question: Question) -> Answer:
    """Asteroid's plan over all devices.

    Raises:
        PlanError: nothing fits, too few units with `--private`, groups are not allowed.
    """
    refuse_groups(question, "hybrid")
    refuse_short_models(question, "hybrid")
    judged = judge_hybrid(question)
    if judged is None:
        raise PlanError(explain(question))
    used = frozenset(judged.draft.devices)
    unused = [device for device in question.devices if device not in used]
    return Answer(judged.draft, {device: _no_room(question, device) for device in unused})


def judge_hybrid(question: Question) -> Judged | None:
    """The micro-batch size whose plan simulates fastest, or None where nothing fits."""
    part = inner_part(question)
    if part.unit_count < 1 or (len(question.devices) > 1 and not question.groups):
        return None
    times = SampleTimes(question.cost, max(split.first_samples for split in question.splits))
    grid = _fine_grid(part)
    plans = [planned(grid, times, split) for split in _sizes(question.splits, part, grid, times)]
    return fastest(question, [plan.draft for plan in plans if plan is not None])


def _sizes(
    splits: Sequence[BatchSplit], part: Inner, fine: Grid, times: SampleTimes
) -> Sequence[BatchSplit]:
    """All sizes, of large questions the promising ones."""
    if fine.blocks * len(fine.steps) <= 4 * ROUGH * ROUGH or len(splits) <= PROMISING:
        return splits
    rough = make_grid(part, ROUGH, ROUGH)
    found = [(planned(rough, times, split), split) for split in splits]
    possible = [(plan.seconds, split) for plan, split in found if plan is not None]
    possible.sort(key=lambda pair: pair[0])
    return [split for _, split in possible[:PROMISING]] or splits


def _fine_grid(part: Inner) -> Grid:
    units, devices = part.unit_count, len(part.devices)
    if units <= EXACT_UNITS and devices <= EXACT_DEVICES:
        return make_grid(part, units, devices)
    blocks, steps = next(grid[1:] for grid in FINE if devices <= grid[0])
    return make_grid(part, blocks, steps)


@dataclass(frozen=True, slots=True)
class EstimatedPlan:
    """A plan and its latency by the paper's own estimate."""

    seconds: float
    draft: Draft


def planned(grid: Grid, times: SampleTimes, split: BatchSplit) -> EstimatedPlan | None:
    """Asteroid's plan for one size: as published, else without its depths, else without some.

    Arguments:
        times: of at least as many samples as a micro-batch has.
    """
    for every_device, deep in ((True, True), (True, False), (False, True), (False, False)):
        tables = StepTables(grid, times, split, every_device=every_device)
        for plan in _in_order(_HybridSearch(tables, deep=deep)):
            return plan
        if not tables.memory_binds:
            break
    return None


def _in_order(search: _HybridSearch) -> Iterator[EstimatedPlan]:
    """The plans of every number of stages that fit, best first."""
    tables = search.tables
    for stages in np.argsort(search.latency, kind="stable"):
        if np.isfinite(search.latency[stages]):
            borders, groups = search.traced(int(stages))
            permitted = _permitted(tables.grid.part, tables.split, borders, groups)
            if permitted is None:
                continue
            draft = tables.grid.part.draft(tables.split, borders, permitted)
            if draft is not None:
                yield EstimatedPlan(float(search.latency[stages]), draft)


def _permitted(
    part: Inner, split: BatchSplit, borders: Sequence[int], groups: Sequence[StageGroup]
) -> list[StageGroup] | None:
    """The groups as published, or where samples may not be divided, dealing by speed."""
    if Allocation.SAMPLES in part.allocations:
        return list(groups)
    dealing = [
        group if len(group.devices) == 1 else dealing_by_speed(part.cost, split, group.devices, u)
        for group, u in zip(groups, pairwise(borders), strict=True)
    ]
    found = [group for group in dealing if group is not None]
    return found if len(found) == len(dealing) else None


class _HybridSearch:
    """Algorithm 2 on the tables of one grid and split.

    Attributes:
        latency: [P] Q(L, N, p) for p = 1..P.
    """

    def __init__(self, tables: StepTables, *, deep: bool) -> None:
        self.tables, self._deep = tables, deep
        self._blocks, self._count = tables.grid.blocks, len(tables.grid.steps) - 1
        self._choices: list[Wholes] = []
        levels = [self._last()]
        for p in range(2, min(self._blocks, self._count) + 1):
            levels.append(self._extended(levels[-1], p))
        self.latency = np.array([float((level[0] + level[1])[0, 0]) for level in levels])

    def _depth(self, p: int) -> int:
        """K of the head of p stages; the holder's last stage (`--private`) is one more behind."""
        behind = p + self.tables.grid.part.private
        return min(2 * behind - 1, self.tables.split.micro_batches) if self._deep else 1

    def _last(self) -> tuple[Floats, Floats, Wholes]:
        """([D, U] A, [D, U] R, [D, U] end of the head group) of single stages from (a, i) on."""
        grid, count = self.tables.grid, self._count
        forward, backward = self.tables.execution(self._depth(1))
        tails = grid.numbers[:, count]
        value = self._rounds * (forward + backward)[tails, :, self._blocks]
        reduce = grid.reduce[tails, :, self._blocks]
        return value, reduce, np.full(value.shape, count)

    @property
    def _rounds(self) -> int:
        return self.tables.split.micro_batches

    def _extended(
        self, behind: tuple[Floats, Floats, Wholes], p: int
    ) -> tuple[Floats, Floats, Wholes]:
        """The same of p stages."""
        forward, backward = self.tables.execution(self._depth(p))
        both = forward + backward
        back = np.where(np.isfinite(backward), backward, 0.0)
        grid, shape = self.tables.grid, (self._count, self._blocks)
        value, rest = np.full(shape, np.inf), np.zeros(shape)
        heads, choice = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for a in range(self._count - 1):
            ends = np.flatnonzero(grid.numbers[a, : self._count] >= 0)  # b
            groups = grid.numbers[a, ends]
            there, return_ = self._hops(a, ends, behind[2])
            hop = there + return_
            waited = np.maximum(hop + behind[0][ends], self._rounds * hop)  # [b, j]
            stage = both[groups][:, :, : self._blocks]  # [b, i, j]
            total = np.maximum(self._rounds * stage, stage + waited[:, None, :])
            after = (behind[1][ends] - return_)[:, None, :] - back[groups][:, :, : self._blocks]
            after = np.maximum(grid.reduce[groups][:, :, : self._blocks], after)
            flat = (total + after).transpose(1, 0, 2).reshape(self._blocks, -1)  # [i, b·j]
            chosen = np.argmin(flat, axis=1)
            b, j, i = chosen // self._blocks, chosen % self._blocks, np.arange(self._blocks)
            value[a], rest[a] = total[b, i, j], after[b, i, j]
            heads[a], choice[a] = ends[b], j
        self._choices.append(np.stack((heads, choice)))
        return value, rest, heads

    def _hops(self, a: int, ends: Wholes, behind: Wholes) -> tuple[Floats, Floats]:
        """[b, j] seconds of the outputs to the group behind, and of the gradients back."""
        grid = self.tables.grid
        carried = grid.output_bytes * self.tables.split.first_samples
        there, back = grid.rates[:, a, ends[:, None], behind[ends]]
        return carried / there, carried / back

    def traced(self, stages: int) -> tuple[list[int], list[StageGroup]]:
        """(borders, groups) of the best pipeline of `stages` + 1 stages."""
        grid, a, i = self.tables.grid, 0, 0
        borders, groups = [int(grid.cuts[0])], []
        for p in range(stages + 1, 0, -1):
            if p == 1:
                b, j = self._count, self._blocks
            else:
                b, j = (int(value) for value in self._choices[p - 2][:, a, i])
            shares = self.tables.shares(a, b, (i, j), self._depth(p))
            devices = grid.order[grid.steps[a] : grid.steps[b]]
            some = [(d, share) for d, share in zip(devices, shares, strict=True) if share]
            groups.append(StageGroup(tuple(d for d, _ in some), tuple(share for _, share in some)))
            borders.append(int(grid.cuts[j]))
            a, i = b, j
        return borders, groups


def _no_room(question: Question, device: int) -> str:
    memory = question.cost.devices[device].memory_bytes
    return (
        f"planner hybrid sorts devices by memory, and this one's {size_text(memory)} are too "
        "little for one sample of the layers that it would get"
    )
