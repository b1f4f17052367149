"""Two groups that deal whole micro-batches: which devices, which border, how many micro-batches.

Who deals gives each device a whole number of them, so that how even a round is depends on how many
there are more than on anything else: of 9 micro-batches 5 : 2 : 2 suit devices of speeds
2.4 : 1 : 1, of 8 nothing does. Other searches begin with measured sizes and go on by small steps,
each of which makes it worse. Here every number of micro-batches is looked at, with every way to
divide the devices between two stages and every border, by the time that the slower stage computes:

    least T with   sum over its devices of floor(T / seconds of one micro-batch)  =  all of them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.search.drafting import Drafter
from p2ptrain.plan.search.group_tables import Floats, Kind, Wholes
from p2ptrain.plan.shared.coarsen import useful_cuts
from p2ptrain.plan.shared.judge import Judged
from p2ptrain.plan.shared.question import Question
from p2ptrain.plan.split import BatchSplit

MOST_DEVICES = 8
"""With more there are too many ways to divide them."""
MOST_CUTS = 31
MOST_DEALT = 24
"""Micro-batches of a round; of more, almost any number suits, and other searches find it."""
DRAFTED = 6
"""Of each number of micro-batches, the best by estimate."""
SIMULATED = 16
"""Of all, the best by bound."""
FILL_SHARE = 0.25
"""Part of the first micro-batch's way for which the second stage waits; during the rest of it the
round before still goes on."""
LEAST_SECONDS = 1e-12
"""Some units take no time."""
HALVINGS = 16
"""Of the interval in which T lies, which is as long as one micro-batch takes."""


@dataclass(frozen=True, slots=True)
class _Halves:
    """Devices of the first of two stages, and its end.

    Attributes:
        fill_seconds: of one micro-batch, through the fastest device of either.
    """

    split: BatchSplit
    border: int
    first: tuple[int, ...]
    fill_seconds: float


def dealt_halves(question: Question, drafter: Drafter) -> list[Judged]:
    """The best of them, simulated; none where the question forbids them or has many devices."""
    judge, rules, least = drafter.judge, drafter.rules, question.least_piece
    may = rules.groups and rules.permit(deals=True) and not rules.private
    some = 2 < len(question.devices) <= MOST_DEVICES and question.cost.unit_count > 1
    if least is None or not may or not some:
        return []
    bounds: dict[Draft, float] = {}
    for halves in _estimated(question.cost, question.devices, _splits(question, least)):
        for draft in _drafts(question, drafter, halves):
            bounds[draft] = judge.bound(draft) + FILL_SHARE * halves.fill_seconds
    best = sorted(bounds, key=lambda draft: bounds[draft])[:SIMULATED]
    return [Judged(judge.seconds(draft), draft) for draft in best]


def _splits(question: Question, least_piece: int) -> list[BatchSplit]:
    """One of each number of micro-batches, which are alike as far as they can be."""
    batch_size = question.splits[0].batch_size
    counts = range(len(question.devices), min(MOST_DEALT, batch_size) + 1)
    splits = dict.fromkeys(BatchSplit(batch_size, -(-batch_size // count)) for count in counts)
    return [split for split in splits if split.last_samples >= least_piece]


def _drafts(question: Question, drafter: Drafter, halves: _Halves) -> Iterator[Draft]:
    rest = tuple(device for device in question.devices if device not in halves.first)
    kinds = [Kind(devices, deals=len(devices) > 1) for devices in (halves.first, rest)]
    return drafter.drafts(halves.split, (0, halves.border, question.cost.unit_count), kinds)


def _estimated(
    cost: CostModel, devices: Sequence[int], splits: Sequence[BatchSplit]
) -> Iterator[_Halves]:
    """Of each split the best; of those that differ by equal devices one."""
    cuts = useful_cuts(cost, MOST_CUTS)
    masks = np.arange(1, (1 << len(devices)) - 1)
    first = masks[:, None] >> np.arange(len(devices)) & 1  # [G, D] 1 = of the first stage
    for split in splits:
        front, back = _seconds(cost, devices, cuts, split.first_samples)
        fills = _least(first, front) + _least(1 - first, back)
        count = split.micro_batches
        longest = np.maximum(makespans(first, front, count), makespans(1 - first, back, count)) + (
            FILL_SHARE * fills
        )
        _, alike = np.unique(front[:, -1], return_inverse=True)
        seen: set[tuple[int, ...]] = set()
        for place in np.argsort(longest, axis=None):
            group, cut = divmod(int(place), len(cuts))
            chosen = tuple(i for i in range(len(devices)) if first[group, i])
            sign = (cut, *sorted(int(alike[i]) for i in chosen))
            if sign in seen:
                continue
            if len(seen) == DRAFTED:
                break
            seen.add(sign)
            names = tuple(devices[i] for i in chosen)
            yield _Halves(split, cuts[cut], names, float(fills[group, cut]))


def _seconds(
    cost: CostModel, devices: Sequence[int], cuts: Sequence[int], samples: int
) -> tuple[Floats, Floats]:
    """[D, C] of a micro-batch of so many samples, on units in front of each cut and behind it."""
    end = cost.unit_count
    front = [[sum(cost.stage_seconds(d, 0, cut, samples)) for cut in cuts] for d in devices]
    back = [[sum(cost.stage_seconds(d, cut, end, samples)) for cut in cuts] for d in devices]
    return np.array(front), np.array(back)


def _least(members: Wholes, seconds: Floats) -> Floats:
    """[G, C] the least `seconds` [D, C] of each group's `members` [G, D]."""
    least: Floats = np.where(members[:, :, None] > 0, seconds[None], np.inf).min(axis=1)
    return least


def makespans(members: NDArray[np.int64], seconds: Floats, count: int) -> Floats:
    """[G, C] least time in which groups deal with `count` micro-batches; `HALVINGS` say how exact.

    Args:
        members: [G, D] 1 where a device belongs to a group; each has one.
        seconds: [D, C] of one micro-batch.
    """
    rates = 1 / np.maximum(seconds, LEAST_SECONDS)
    low = count / (members @ rates)
    high = low + (members[:, :, None] * seconds[None]).max(axis=1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        dealt = (members[:, :, None] * np.floor(middle[:, None, :] * rates[None])).sum(axis=1)
        enough = dealt >= count
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    found: Floats = high
    return found
