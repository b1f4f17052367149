"""`pipedream`: stages replicated over equal devices, by the slowest one (PipeDream, section 3.1).

T_l is unit l's forward and backward for a mini-batch, C_l = a_l / bandwidth, and summing the
gradients of unit l over m devices takes W_l(m) = 4 (m-1)/m · w_l / bandwidth (the paper's
distributed parameter server):

    T(i..j, m) = 1/m · max( sum T_l ,  sum W_l(m) )
    A(j, m)    = min( T(0..j, m) ,
                      min over i, m' of  max( A(i, m-m') ,  2·C_i ,  T(i+1..j, m') ) )

The paper's devices are equal. Here T_l is the mean over the devices, of one micro-batch times the
micro-batches of a round, and the bandwidth is the mean over all directed links between them.
Stages take the devices in list order, the holder first, then by name. Inside a stage all shares are
equal: whole micro-batches in turn, as PipeDream's round robin deals them, or samples of each
micro-batch where these come out more even. Asynchronously a mini-batch travels whole and stages
always deal, as published; where none may have several devices, each has one.

The paper has no memory limits: here a stage that one of its devices cannot hold is impossible, and
other orders are tried. For a synchronous round the simulation chooses the micro-batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone
from p2ptrain.plan.planners.published import (
    Inner,
    fastest,
    inner_part,
    orders,
    refuse_groups,
    refuse_short_models,
)
from p2ptrain.plan.problem.candidates import even_window
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judged
from p2ptrain.plan.problem.order_cuts import Floats, Wholes, range_sums
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.request import PlanMode

MAX_STEPS = 100
"""Above that many devices stages take them in bundles: the programme grows with their square."""


def plan_pipedream(question: Question) -> Answer:
    """The published partition over all devices.

    Raises:
        PlanError: nothing fits, too few units with `--private`, groups are not allowed.
    """
    straight = _is_straight(question)
    if not straight:
        refuse_groups(question, "pipedream")
    refuse_short_models(question, "pipedream", straight=straight)
    judged = judge_pipedream(question)
    if judged is None:
        raise PlanError(explain(question, every_device=True))
    return Answer(judged.draft, {})


def judge_pipedream(question: Question) -> Judged | None:
    """The micro-batch size whose partition simulates fastest, or None where nothing fits."""
    part = inner_part(question)
    straight = _is_straight(question)
    if part.unit_count < 1 or (len(question.devices) > 1 and not question.groups and not straight):
        return None
    drafts = [partitioned(part, split, straight=straight) for split in question.splits]
    return fastest(question, [draft for draft in drafts if draft is not None])


def _is_straight(question: Question) -> bool:
    """Whether every stage has one device: asynchronously, where none may have several."""
    return question.judge.cost.mode is PlanMode.ASYNC and not question.groups


def partitioned(part: Inner, split: BatchSplit, *, straight: bool = False) -> Draft | None:
    """The published plan for one size, on the first order of devices that fits.

    Arguments:
        straight: with one device a stage.
    """
    if len(part.devices) > part.unit_count * max(split.micro_batches, split.first_samples):
        return None  # not a share for each
    table = _StageTable(part, split, straight=straight)
    for order in orders(part):
        memory = np.array([float(part.cost.devices[d].memory_bytes) for d in order])
        stages = _solve(table, memory, _alike_from(part, table.steps, order))
        if stages is not None:
            borders = [part.first, *(part.first + end for end, _ in stages)]
            counts = [count for _, count in stages]
            whole = even_window(split, counts) if part.cost.mode is PlanMode.ASYNC else split
            groups = _groups(part, whole, order, counts)
            draft = part.draft(whole, borders, groups)
            if draft is not None:
                return draft
    return None


class _StageTable:
    """T(i..j, m) of one split, and what a device needs for it.

    Attributes:
        steps: [D+1] devices before every border that groups may have, 0..N.
        hop: [U] seconds of a mini-batch, both ways, over the cut before every unit.
    """

    def __init__(self, part: Inner, split: BatchSplit, *, straight: bool) -> None:
        count, bundle = len(part.devices), -(-len(part.devices) // MAX_STEPS)
        bundle = 1 if straight else bundle
        self.steps = np.array([*range(0, count, bundle), count])
        counts = {int(end - first) for end in self.steps for first in self.steps if end > first}
        counts = {1} if straight else counts
        rate = _mean_rate(part.cost, part.devices)
        units = part.cost.profile.units[part.first : part.end]
        output_bytes = np.array([0.0, *(unit.output_bytes for unit in units[:-1])])
        self.hop = 2.0 * split.first_samples * _pieces(part, split) * output_bytes / rate
        sync = range_sums(4 * part.summed_bytes() / rate)
        work = _mean_seconds(part, split)
        # One, not none, where it is impossible: empty ranges need inf bytes, and 0 * inf is NaN.
        self._part, self._samples = part, np.ones(count + 1)
        self._seconds = np.full((count + 1, len(units), len(units) + 1), np.inf)
        for m in counts:
            samples = _samples_held(part, split, m)
            if samples == np.inf:
                self._seconds[m] = np.inf
                continue
            slower = np.maximum(work, (m - 1) / m * sync) if m > 1 else work
            np.divide(slower, m, out=self._seconds[m])
            self._samples[m] = samples

    def stages(self, m: int, memory: Floats) -> Floats:
        """[m, U, U+1] seconds of units [i, j) on the devices from each border before border m.

        Arguments:
            memory: [N] bytes of the devices in order; inf where one of them cannot hold the units.
        """
        counts: Wholes | slice = self.steps[m] - self.steps[:m]
        if len(self.steps) == len(self._seconds):  # borders everywhere: views are enough
            counts = slice(m, 0, -1)
        least = np.minimum.accumulate(memory[: self.steps[m]][::-1])[::-1]
        least, samples = least[self.steps[:m]], self._samples[counts]
        if self._hold_the_whole(samples, least):
            return self._seconds[counts]
        held, activations = self._part.held_bytes(), self._part.activation_bytes()
        needs = held + samples[:, None, None] * activations
        return np.where(needs <= least[:, None, None], self._seconds[counts], np.inf)

    def _hold_the_whole(self, samples: Floats, memory: Floats) -> bool:
        """Whether devices of that memory hold all units with that many samples in flight."""
        part = self._part
        held = part.cost.held_bytes(part.first, part.end)
        needs = held + samples * part.cost.activation_bytes(part.first, part.end)
        return bool((needs <= memory).all())


def _alike_from(part: Inner, steps: Wholes, order: Sequence[int]) -> list[int]:
    """From which border on groups that end at each border are of devices that may have one."""
    found = [0]
    for end in range(1, len(steps)):
        first = found[-1]
        while not part.cost.may_share(order[steps[first] : steps[end]]):
            first += 1
        found.append(first)
    return found


def _solve(
    table: _StageTable, memory: Floats, alike: Sequence[int]
) -> list[tuple[int, int]] | None:
    """(end unit, devices) of every stage of A(U, N), first stage first; None: impossible.

    Arguments:
        alike: of `_alike_from`.
    """
    units = len(table.hop)
    best = np.full((len(table.steps), units + 1), np.inf)  # A(j, m)
    best[0, 0] = 0.0
    choices = [np.zeros(units + 1, dtype=np.int64)]
    for m in range(1, len(table.steps)):
        before = np.maximum(best[:m, :units], table.hop)  # nothing crosses before unit 0
        before[: alike[m]] = np.inf
        slowest = np.maximum(before[:, :, None], table.stages(m, memory)).reshape(-1, units + 1)
        choices.append(np.argmin(slowest, axis=0))  # of m' and i, by j
        best[m] = slowest[choices[m], np.arange(units + 1)]
    return _traced(table, choices) if np.isfinite(best[-1, units]) else None


def _traced(table: _StageTable, choices: Sequence[Wholes]) -> list[tuple[int, int]]:
    units = len(table.hop)
    stages, end, border = [], units, len(choices) - 1
    while border:
        before, first = divmod(int(choices[border][end]), units)
        stages.append((end, int(table.steps[border] - table.steps[before])))
        end, border = first, before
    return stages[::-1]


def _mean_seconds(part: Inner, split: BatchSplit) -> Floats:
    """[U, U+1] seconds of units [i, j) for a mini-batch, mean over the devices."""
    each = [part.cost.unit_times(device, split.first_samples) for device in part.devices]
    mean = np.mean([np.add(times.forward, times.backward) for times in each], axis=0)
    return range_sums(mean[part.first : part.end] * _pieces(part, split))


def _pieces(part: Inner, split: BatchSplit) -> float:
    """Micro-batches of a mini-batch; asynchronously the mini-batch travels whole."""
    return 1.0 if part.cost.mode is PlanMode.ASYNC else split.batch_size / split.first_samples


def _mean_rate(cost: CostModel, devices: Sequence[int]) -> float:
    """Mean bytes/s over all directed links between the devices; inf for one alone."""
    count = len(devices)
    if count == 1:
        return np.inf
    rates = cost.links.rates[np.ix_(devices, devices)][~np.eye(count, dtype=bool)]
    return float(rates.mean())


def _deals(part: Inner, split: BatchSplit, devices: int) -> bool:
    """Whether whole micro-batches come out at least as even as samples of each."""
    if len(part.allocations) == 1:
        return Allocation.MICRO_BATCHES in part.allocations
    if part.cost.mode is PlanMode.ASYNC:
        return devices <= split.micro_batches

    def unevenness(count: int) -> float:
        return -(-count // devices) * devices / count if count >= devices else np.inf

    return unevenness(split.micro_batches) <= unevenness(split.first_samples)


def _samples_held(part: Inner, split: BatchSplit, devices: int) -> float:
    """Samples a device has in flight at least; inf where there is not one share for each."""
    if devices == 1:
        return split.first_samples
    deals = _deals(part, split, devices)
    if devices > (split.micro_batches if deals else split.first_samples):
        return np.inf
    return split.first_samples if deals else -(-split.first_samples // devices)


def _groups(
    part: Inner, split: BatchSplit, order: Sequence[int], counts: Sequence[int]
) -> list[StageGroup]:
    groups, taken = [], 0
    for count in counts:
        devices = tuple(order[taken : taken + count])
        taken += count
        groups.append(_equal_group(part, split, devices))
    return groups


def _equal_group(part: Inner, split: BatchSplit, devices: tuple[int, ...]) -> StageGroup:
    """Equal shares; those listed first take what does not divide."""
    count = len(devices)
    if count == 1:
        return alone(split, devices[0])
    deals = _deals(part, split, count)
    whole = split.micro_batches if deals else split.first_samples
    shares = tuple(whole // count + (place < whole % count) for place in range(count))
    return StageGroup(devices, shares, Allocation.MICRO_BATCHES if deals else Allocation.SAMPLES)
