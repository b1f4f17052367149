"""`pp`: a straight pipeline over all devices whose stages take equal shares of computing time.

What a person who ignores links would build; obeyed even where it is slow, and the yardstick for
`auto`. The holder comes first, then the largest memory (earlier stages keep more in flight).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from math import isfinite

import numpy as np

from p2ptrain.errors import PlanError
from p2ptrain.plan.draft import Draft, draft_pipeline
from p2ptrain.plan.shared.infeasible import explain
from p2ptrain.plan.shared.judge import Judged
from p2ptrain.plan.shared.orders import likely_orders
from p2ptrain.plan.shared.partition import Floats, Partition
from p2ptrain.plan.shared.question import Answer, Question
from p2ptrain.plan.split import BatchSplit

MOST_ORDERS = 120
"""Orders tried before giving up, where memory rules out the first ones."""


def plan_pp(question: Question) -> Answer:
    """The pipeline over every device; PlanError where no order of them fits."""
    stages = len(question.devices) + (question.private and len(question.devices) > 1)
    if stages > question.cost.unit_count:
        raise PlanError(
            f"planner pp gives every device a stage, but the model has "
            f"{question.cost.unit_count} units for {stages} stages: use --planner auto, which "
            "leaves devices out"
        )
    judged = judge_pp(question)
    if judged is None:
        raise PlanError(explain(question, every_device=True))
    return Answer(judged.draft, {})


def judge_pp(question: Question) -> Judged | None:
    """The fastest micro-batch size of that pipeline, or None where nothing fits."""
    drafts = []
    for split in question.splits:
        draft = equal_shares(question, split)
        if draft is None:
            break  # larger micro-batches need more memory still
        drafts.append(draft)
    best = question.judge.best_of(drafts)
    return None if best is None else question.judge.exact(best.draft)


def equal_shares(question: Question, split: BatchSplit) -> Draft | None:
    """That pipeline for one split: the first order of devices that fits."""
    partition = Partition(question.cost, split)
    for order in _orders(question):
        for borders in _borders(partition, order):
            draft = draft_pipeline(question.cost, split, borders, order)
            if draft is not None:
                return draft
    return None


def _orders(question: Question) -> Iterator[tuple[int, ...]]:
    holder = question.cost.holder
    ends = (holder,) if question.private and len(question.devices) > 1 else ()
    rest = [device for device in question.devices if device != holder]
    first = (holder,) if holder in question.devices else ()
    if not rest:
        yield first
        return
    for order in likely_orders(question.cost, rest):
        yield (*first, *order, *ends)
    free = rest if ends else question.devices
    for others in islice(permutations(free), MOST_ORDERS):
        yield (*ends, *others, *ends)


def _borders(partition: Partition, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Borders of the most equal shares that each stage by itself fits the memory for.

    Where the first device has the last stage too, the most equal ones for every size of that,
    the most equal of all first: the two may fit together where those do not.
    """
    tables = [partition.seconds(device) for device in order]
    units = len(tables[0])
    if len(order) == 1 or order[0] != order[-1]:
        unevenness, borders = most_equal(tables, units)
        if isfinite(sum(unevenness)):
            yield borders
        return
    found = []
    for cut in range(len(order) - 1, units):  # the last stage, which is the first device's too
        both = tables[0] + tables[-1][cut, units]
        found.append(most_equal([both, *tables[1:-1]], cut))
    for unevenness, borders in sorted(found):
        if isfinite(sum(unevenness)):
            yield (*borders, units)


def most_equal(tables: Sequence[Floats], units: int) -> tuple[tuple[float, float], tuple[int, ...]]:
    """((slowest stage's seconds, sum of squares), borders): least slowest first, then least sum."""
    slowest, _ = _fold(tables, units, np.maximum)
    allowed = slowest * (1 + 1e-12)
    squares = [np.where(table <= allowed, table * table, np.inf) for table in tables]
    total, borders = _fold(squares, units, np.add)
    return (slowest, total), borders


def _fold(tables: Sequence[Floats], units: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """(least value, borders) of units 0..units-1 cut into len(tables) stages."""
    value = tables[-1][:units, units]  # by first unit
    cuts = []
    for table in reversed(tables[:-1]):
        joined = join(table[:units, :units], value[None, :])
        cuts.append(np.argmin(joined, axis=1))
        value = joined.min(axis=1)
    borders = [0]
    for cut in reversed(cuts):
        borders.append(int(cut[borders[-1]]))
    return float(value[0]), (*borders, units)
