"""`single` and `dp`: the whole model on one device, or on every device.

`single` is the reference that `auto` must never be slower than.

`dp` is data parallelism, the first baseline of Asteroid (section 5.1), with shares by speed and
memory as its Algorithm 1 gives them (section 3.3); gradients are summed once a round. The devices
divide the samples of each micro-batch, or take whole micro-batches in turn, as the request allows;
the simulation decides which is faster. The fewer and larger the micro-batches, the longer the last
backward, behind which the all-reduce hides: at best every device has one (what PyTorch's
DistributedDataParallel does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from p2ptrain.errors import PlanError, size_text
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups, draft_pipeline
from p2ptrain.plan.planners.group_shares import Rows, SampleTimes, divide
from p2ptrain.plan.planners.published import (
    dealing_by_speed,
    fastest,
    refuse_groups,
    refuse_kinds,
)
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.types.allocation import Allocation, BatchSplit


def best_singles(
    judge: Judge, splits: Sequence[BatchSplit], devices: Sequence[int]
) -> dict[int, Judged]:
    """The fastest split of every device that can hold the whole model, by device.

    Give only the holder where raw data must not leave it.
    """
    best: dict[int, Judged] = {}
    for device in devices:
        drafts = [
            draft_pipeline(judge.cost, split, (0, judge.cost.unit_count), (device,))
            for split in splits
        ]
        found = judge.best_of([draft for draft in drafts if draft is not None])
        if found is not None:
            best[device] = judge.exact(found.draft)
    return best


def plan_single(question: Question) -> Answer:
    """The fastest device alone (with `private` the holder); PlanError where it fits none."""
    cost = question.cost
    able = (cost.holder,) if question.private else question.devices
    allowed = [device for device in able if may_be_alone(question, device)]
    if not allowed:
        raise PlanError(
            "planner single uses one device, and --cap or --require forbid that for each device: "
            "try --planner auto"
        )
    singles = best_singles(question.judge, question.splits, allowed)
    if not singles:
        raise PlanError(explain(question, one_device=True))
    best = min(singles, key=lambda device: (singles[device].seconds, device))
    others = [device for device in question.devices if device != best]
    reasons = {device: _reason(question, singles, best, device) for device in others}
    return Answer(singles[best].draft, reasons)


def may_be_alone(question: Question, device: int) -> bool:
    """Whether the request allows that device to do a whole round's work."""
    return question.required <= {device} and question.caps.get(device, 1.0) >= 1


def _reason(question: Question, singles: dict[int, Judged], best: int, device: int) -> str:
    cost = question.cost
    chosen = f"{cost.name(best)}'s {singles[best].seconds:.3g} s"
    if question.private:
        return "planner single with --private uses only the device with the data"
    if not may_be_alone(question, device):
        return "planner single uses one device, and --cap or --require forbid this one alone"
    if device in singles:
        seconds = singles[device].seconds
        return f"planner single uses one device: {seconds:.3g} s a step here, not {chosen}"
    needed = cost.peak_bytes(0, cost.unit_count, question.splits[0].first_samples)
    memory = cost.devices[device].memory_bytes
    return f"the whole model needs {size_text(needed)}, this device has {size_text(memory)}"


MAX_FOR_EACH = 4
"""Micro-batches a device, on average, beyond the usual sizes of micro-batches."""

MAX_STEPS = 8
"""Numbers of micro-batches tried for each one more."""


def plan_dp(question: Question) -> Answer:
    """All devices in one stage.

    Raises:
        PlanError: a device cannot hold the whole model; more devices than samples and than
            micro-batches; raw data must stay on the holder; groups are not allowed.
    """
    refuse_groups(question, "dp")
    if question.private and len(question.devices) > 1:
        raise PlanError(
            "planner dp sends raw inputs and labels to every device, which --private forbids: use "
            "--planner auto or pp"
        )
    refuse_kinds(question, "dp gives all devices the whole model")
    _refuse_small_devices(question)
    judged = judge_dp(question)
    if judged is None:
        raise PlanError(_why_not(question))
    return Answer(judged.draft, {})


def judge_dp(question: Question) -> Judged | None:
    """The fastest micro-batch size and division, or None where nothing fits."""
    if len(question.devices) > 1 and (question.private or not question.groups):
        return None
    if not question.cost.may_share(question.devices):
        return None
    times = SampleTimes(question.cost, max(split.first_samples for split in question.splits))
    drafts = [draft for split in question.splits for draft in _drafts(question, times, split)]
    return fastest(question, [*drafts, *_few_for_each(question)])


def _few_for_each(question: Question) -> Iterator[Draft]:
    """Every device takes a few whole micro-batches, with as little left over as can be."""
    least, count = question.min_micro_batch, len(question.devices)
    if least is None or count == 1 or Allocation.MICRO_BATCHES not in question.allocations:
        return
    batch_size = question.splits[0].batch_size
    spread = range(count, MAX_FOR_EACH * count + 1, max(1, count // MAX_STEPS))
    for micro_batches in spread:
        split = BatchSplit(batch_size, -(-batch_size // micro_batches))
        if min(split.first_samples, split.last_samples) >= least:
            yield from _dealt(question, split)


def _dealt(question: Question, split: BatchSplit) -> Iterator[Draft]:
    group = _by_micro_batches(question, split)
    borders = (0, question.cost.unit_count)
    draft = None if group is None else draft_groups(question.cost, split, borders, (group,))
    if draft is not None:
        yield draft


def _drafts(question: Question, times: SampleTimes, split: BatchSplit) -> Iterator[Draft]:
    cost, borders = question.cost, (0, question.cost.unit_count)
    if len(question.devices) == 1 or Allocation.SAMPLES in question.allocations:
        group = _by_samples(question, times, split)
        draft = None if group is None else draft_groups(cost, split, borders, (group,))
        if draft is not None:
            yield draft
    if Allocation.MICRO_BATCHES in question.allocations:
        yield from _dealt(question, split)


def _by_samples(question: Question, times: SampleTimes, split: BatchSplit) -> StageGroup | None:
    """Shares by Algorithm 1; None where a device cannot have a sample of each micro-batch."""
    cost, devices = question.cost, question.devices
    units, samples = cost.unit_count, split.first_samples
    room = [cost.samples_that_fit(0, units, _memory(cost, d)) for d in devices]
    rows = Rows(np.array([devices]), np.array([0]), np.array([units]))
    limits = np.array([[min(most, samples) for most in room]])
    (shares,) = divide(times, rows, samples, limits).samples
    return StageGroup(devices, tuple(map(int, shares))) if shares.all() else None


def _by_micro_batches(question: Question, split: BatchSplit) -> StageGroup | None:
    if len(question.devices) == 1:
        return None
    return dealing_by_speed(question.cost, split, question.devices, (0, question.cost.unit_count))


def _refuse_small_devices(question: Question) -> None:
    cost = question.cost
    needed = cost.peak_bytes(0, cost.unit_count, 1)
    for device in question.devices:
        memory = _memory(cost, device)
        if memory < needed:
            raise PlanError(
                f"planner dp gives every device the whole model, which needs "
                f"{size_text(needed)} with one sample, and {cost.name(device)} has "
                f"{size_text(memory)}: {size_text(needed - memory)} missing; use --planner auto, "
                "or leave that device out"
            )


def _why_not(question: Question) -> str:
    cost, devices, splits = question.cost, question.devices, question.splits
    if Allocation.SAMPLES not in question.allocations:
        least = min(split.first_samples for split in splits)
        smaller = "a smaller --micro-batch, " if least > 1 else ""
        return (
            "planner dp may not divide this job's micro-batches, only deal whole ones, and "
            f"{len(devices)} devices cannot take turns at "
            f"{max(split.micro_batches for split in splits)} or fewer micro-batches, each of which "
            f"must fit the memory of every device: use {smaller}a larger batch or --planner auto"
        )
    if max(max(split.first_samples, split.micro_batches) for split in splits) < len(devices):
        return (
            f"planner dp gives every device a part of the batch, but {len(devices)} devices cannot "
            f"divide micro-batches of at most {max(split.first_samples for split in splits)} "
            f"samples, nor take turns at {max(split.micro_batches for split in splits)} "
            "micro-batches: use a larger batch or --planner auto"
        )
    takes = {d: cost.samples_that_fit(0, cost.unit_count, _memory(cost, d)) for d in devices}
    least = min(takes, key=lambda device: takes[device])
    return (
        f"planner dp gives every device the whole model: beside it the devices hold "
        f"{sum(takes.values())} samples together, of micro-batches of at least "
        f"{splits[0].first_samples}, and {cost.name(least)} holds {takes[least]}: use a smaller "
        "--micro-batch or --planner auto"
    )


def _memory(cost: CostModel, device: int) -> int:
    return cost.devices[device].memory_bytes
