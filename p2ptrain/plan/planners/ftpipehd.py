"""`ftpipehd`: one device a stage, unlike devices in list order (FTPipeHD, section III-D).

The capacity of worker n is its time over the holder's for the same units, T_n,l = C_n · T_0,l, and
the slowest part of the pipeline is made as fast as possible, with B_n the rate from n to n+1:

    A(0..j, 1) = T_0(0..j)
    A(0..j, n) = min over i of  max( A(0..i, n-1) ,  2·a_i / B_(n-2) ,  T_(n-1)(i+1..j) )

The paper's list is in order of arrival; here the holder comes first, then the names. It has no
memory limits: here a stage that its device cannot hold is impossible, and other orders are tried
where the list's own leaves nothing. It trains whole mini-batches asynchronously; for a synchronous
round its partition is solved for every micro-batch size and the simulation chooses the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.draft import Draft, alone
from p2ptrain.plan.planners.equal_shares import most_even_cuts
from p2ptrain.plan.planners.published import Inner, fastest, inner_part, orders, refuse_short_models
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judged
from p2ptrain.plan.problem.order_cuts import Floats
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.types.allocation import BatchSplit


def plan_ftpipehd(question: Question) -> Answer:
    """A stage for every device; PlanError where there are too few units or nothing fits."""
    refuse_short_models(question, "ftpipehd", straight=True)
    judged = judge_ftpipehd(question)
    if judged is None:
        raise PlanError(explain(question, every_device=True))
    return Answer(judged.draft, {})


def judge_ftpipehd(question: Question) -> Judged | None:
    """The micro-batch size whose partition simulates fastest, or None where nothing fits."""
    part = inner_part(question)
    if part.unit_count < len(part.devices):
        return None
    drafts = []
    for split in question.splits:
        draft = partitioned(part, split)
        if draft is None:
            break  # larger micro-batches need more memory still
        drafts.append(draft)
    return fastest(question, drafts)


def partitioned(part: Inner, split: BatchSplit) -> Draft | None:
    """The published partition for one size, on the first order of devices that fits."""
    for order in orders(part):
        tables = _tables(part, split, order)
        (slowest, _), borders = most_even_cuts(tables, part.unit_count)
        if isfinite(slowest):
            real = [part.first + border for border in borders]
            draft = part.draft(split, real, [alone(split, device) for device in order])
            if draft is not None:
                return draft
    return None


def capacities(part: Inner, split: BatchSplit, devices: Sequence[int]) -> list[float]:
    """C_n of every device: how many times as long as the holder it takes for the same units."""
    cost, units = part.cost, (part.first, part.end)
    reference = sum(cost.stage_seconds(cost.holder, *units, split.first_samples))
    return [
        sum(cost.stage_seconds(device, *units, split.first_samples)) / reference
        if reference > 0
        else 1.0
        for device in devices
    ]


def _tables(part: Inner, split: BatchSplit, order: Sequence[int]) -> list[Floats]:
    """[U, U+1] seconds of every stage and the link before it, inf where the stage does not fit."""
    cost, samples = part.cost, split.first_samples
    times = cost.unit_times(cost.holder, samples)
    both = np.add(times.forward, times.backward)[part.first : part.end]
    reference = np.concatenate(([0.0], np.cumsum(both)))
    holds = part.held_bytes() + samples * part.activation_bytes()
    tables = []
    for n, capacity in enumerate(capacities(part, split, order)):
        table = capacity * (reference[None, :] - reference[:-1, None])
        if n:
            table = np.maximum(table, _link_seconds(part, samples, order[n - 1], order[n])[:, None])
        fits = holds <= cost.devices[order[n]].memory_bytes
        tables.append(np.where(fits, table, np.inf))
    return tables


def _link_seconds(part: Inner, samples: int, sender: int, receiver: int) -> Floats:
    """[U] seconds of 2·a / B over the cut before every unit."""
    units = part.cost.profile.units
    each = [0, *(unit.output_bytes for unit in units[part.first : part.end - 1])]
    seconds: Floats = 2.0 * samples * np.array(each, dtype=np.float64)
    return seconds / part.cost.link(sender, receiver).bytes_per_s
