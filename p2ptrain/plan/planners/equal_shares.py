"""`pp`: a straight pipeline over all devices whose stages take equal shares of computing time.

What one would build without a look at links; obeyed even where it is slow, and the yardstick for
`auto`. The holder comes first, then the largest memory (earlier stages keep more in flight).

With `--private` the holder has the last stage too, and every length of that is a question of its
own. Of models with many units these are ranked with fewer places to cut, and then cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, permutations
from math import isfinite
from typing import TypeAlias

import numpy as np

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, UnplacedGroup, draft_pipeline
from p2ptrain.plan.problem.candidates import likely_orders, useful_cuts
from p2ptrain.plan.problem.infeasible import explain
from p2ptrain.plan.problem.judge import Judged
from p2ptrain.plan.problem.order_cuts import Floats, OrderCuts
from p2ptrain.plan.problem.question import Answer, Question
from p2ptrain.plan.types.allocation import BatchSplit

MAX_ORDERS = 120
"""Orders tried before giving up, where memory rules out the first ones."""

EXACT_UNITS = 96
"""Up to here every unit may begin the last stage of `--private`: all of them take L^3 a device."""

FEW_CUTS, CUTS_FOR_EACH = 48, 4
"""Places where it may begin in larger models, beside the last unit: so many, or so many a stage
where that is more."""

Unevenness: TypeAlias = tuple[tuple[float, float], tuple[int, ...]]
"""((slowest stage's seconds, sum of squares), borders): the less, the more equal."""


def plan_pp(question: Question) -> Answer:
    """The pipeline over every device; PlanError where no order of them fits."""
    stages = len(question.devices) + (question.private and len(question.devices) > 1)
    if stages > question.cost.unit_count:
        raise PlanError(
            "planner pp gives every device its own layers, but the model has "
            f"{question.cost.unit_count} layers for {stages} parts: use --planner auto, which "
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
    cost, cuts = question.cost, OrderCuts(question.cost, split)
    tables = {
        d: cuts.tables(UnplacedGroup((d,))).seconds[:-1] for d in {*question.devices, cost.holder}
    }
    for order in _orders(question):
        for borders in _borders(cost, split, tables, order):
            draft = draft_pipeline(cost, split, borders, order)
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
    for others in islice(permutations(free), MAX_ORDERS):
        yield (*ends, *others, *ends)


def _borders(
    cost: CostModel, split: BatchSplit, of: Mapping[int, Floats], order: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Borders of the most equal shares that each stage by itself fits the memory for.

    Where the first device has the last stage too, the most equal ones for every size of that,
    the most equal of all first: the two may fit together where those do not.
    """
    tables = [of[device] for device in order]
    if len(order) == 1 or order[0] != order[-1]:
        unevenness, borders = most_even_cuts(tables, cost.unit_count)
        if isfinite(sum(unevenness)):
            yield borders
        return
    lasts = [cut for cut in range(len(order) - 1, cost.unit_count) if _fits(cost, split, cut)]
    most = max(FEW_CUTS, CUTS_FOR_EACH * len(order))
    if cost.unit_count <= EXACT_UNITS:
        most = EXACT_UNITS
    cuts = {0, *useful_cuts(cost, most), cost.unit_count - 1, cost.unit_count}
    yield from likely_lasts(tables, lasts, sorted(cuts))


def _fits(cost: CostModel, split: BatchSplit, last: int) -> bool:
    """Whether the holder has memory for the units from `last` on, and the first one."""
    ends = (0, 1), (last, cost.unit_count)
    needed = sum(cost.peak_bytes(*units, split.first_samples) for units in ends)
    return needed <= cost.devices[cost.holder].memory_bytes


def likely_lasts(
    tables: Sequence[Floats], lasts: Sequence[int], cuts: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Borders for last stages that begin with those of these units that are among `cuts`.

    The most equal ones first, as they are with cuts only there.
    """
    units, allowed = len(tables[0]), set(lasts)
    rough = [table[np.ix_(cuts[:-1], cuts)] for table in tables]
    tried = [
        (_with_last(rough, number)[0], last)
        for number, last in enumerate(cuts)
        if last in allowed and number >= len(tables) - 1
    ]
    for _, last in sorted(tried):
        if not _holds(tables, last):
            continue
        unevenness, borders = _with_last(tables, last)
        if isfinite(sum(unevenness)):
            yield (*borders, units)


def _holds(tables: Sequence[Floats], last: int) -> bool:
    """Whether each stage by itself fits its memory for some borders before that last stage.

    What fits does so with fewer units too: each stage takes all that it can.
    """
    first = 0
    for behind, table in zip(range(len(tables) - 2, -1, -1), tables[:-1], strict=True):
        possible = np.flatnonzero(np.isfinite(table[first, : last - behind + 1]))
        if not len(possible):
            return False
        first = int(possible[-1])
    return first == last


def _with_last(tables: Sequence[Floats], last: int) -> Unevenness:
    """The most equal shares of the units before `last`, where the first device has the rest too."""
    both = tables[0] + tables[-1][last, -1]
    return most_even_cuts([both, *tables[1:-1]], last)


def most_even_cuts(tables: Sequence[Floats], units: int) -> Unevenness:
    """Of borders the least slowest stage, then the least sum."""
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
