"""What the planners of the papers share: their part of the question, and who judges their answers.

The papers know nothing of private data. With `--private` they plan the inner units on the other
devices, and the first and the last unit (folded, see `pinned_units.py`) stay on the holder:

    units     0        1 .. L-2              L-1
    devices   holder   the planner's groups  holder
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone, draft_groups
from p2ptrain.plan.problem.candidates import likely_orders
from p2ptrain.plan.problem.judge import Judged
from p2ptrain.plan.problem.order_cuts import Floats, range_sums
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, BatchSplit, hand_out

MAX_ORDERS = 24
"""Orders tried where memory rules out the paper's own, beyond the likely ones."""

MAX_TASKS = 100_000
"""Rounds of more tasks (half a second of simulation) are only compared where all are that long."""


@dataclass(frozen=True, slots=True)
class Inner:
    """Units [first, end) on `devices`, which may be empty.

    Attributes:
        devices: the holder first where it is among them, then by name: the papers' list order.
        private: the holder has a stage before and one behind.
        allocations: how a group may divide its work.
    """

    cost: CostModel
    first: int
    end: int
    devices: tuple[int, ...]
    private: bool
    allocations: frozenset[Allocation] = EVERY_ALLOCATION

    @property
    def unit_count(self) -> int:
        """U, how many units are planned; below 1 where the holder's ends leave none."""
        return self.end - self.first

    def held_bytes(self) -> Floats:
        """[U, U+1] parameters, gradients and optimizer state of units [i, j); inf where empty."""
        states = self.cost.unit_states[self.first : self.end]
        held: Floats = np.ceil(range_sums(np.array([float(state.trained) for state in states])))
        return held

    def summed_bytes(self) -> Floats:
        """[U] what a group adds up, of each unit."""
        states = self.cost.unit_states[self.first : self.end]
        return np.array([float(state.summed_bytes) for state in states])

    def activation_bytes(self) -> Floats:
        """[U, U+1] bytes a sample in flight of units [i, j); inf where empty."""
        units = self.cost.profile.units[self.first : self.end]
        return range_sums(np.array([float(unit.activation_bytes) for unit in units]))

    def draft(
        self, split: BatchSplit, borders: Sequence[int], groups: Sequence[StageGroup]
    ) -> Draft | None:
        """The whole draft with usual depths, lowered where memory is short; None: it does not fit.

        Arguments:
            borders: of the planned stages, from `first` to `end`.
        """
        if self.private:
            holder = alone(split, self.cost.holder)
            borders, groups = (0, *borders, self.cost.unit_count), (holder, *groups, holder)
        return draft_groups(self.cost, split, borders, groups)


def inner_part(question: Question) -> Inner:
    """What is left for the published algorithm; the holder alone keeps the whole model."""
    cost, holder, allowed = question.cost, question.cost.holder, question.allocations
    others = tuple(device for device in question.devices if device != holder)
    if question.private and others:
        return Inner(cost, 1, cost.unit_count - 1, others, True, allowed)
    first = (holder,) if holder in question.devices else ()
    return Inner(cost, 0, cost.unit_count, (*first, *others), False, allowed)


def orders(part: Inner) -> Iterator[tuple[int, ...]]:
    """The papers' list order, then others for when memory rules it out."""
    likely = [part.devices, *likely_orders(part.cost, part.devices)]
    yield from dict.fromkeys((*likely, *islice(permutations(part.devices), MAX_ORDERS)))


def fastest(question: Question, drafts: Sequence[Draft]) -> Judged | None:
    """The draft that simulates fastest, or None where there is none."""
    short = [draft for draft in drafts if _tasks(draft) <= MAX_TASKS]
    best = question.judge.best_of(short or sorted(drafts, key=_tasks)[:1])
    return None if best is None else question.judge.exact(best.draft)


def _tasks(draft: Draft) -> int:
    """Forwards and backwards of a round."""
    return 2 * len(draft.devices) * draft.split.micro_batches


def dealing_by_speed(
    cost: CostModel, split: BatchSplit, devices: tuple[int, ...], units: tuple[int, int]
) -> StageGroup | None:
    """One micro-batch to each device, then each further one to the device that is done first.

    None where there are fewer micro-batches than devices.
    """
    count = split.micro_batches
    if count < len(devices):
        return None
    each = [sum(cost.stage_seconds(device, *units, split.first_samples)) for device in devices]
    ones, most = [1] * len(devices), [count] * len(devices)
    shares = hand_out(count, ones, most, lambda i, share: share * each[i])
    return StageGroup(devices, shares, Allocation.MICRO_BATCHES)


def refuse_groups(question: Question, planner: str) -> None:
    """PlanError where stages of several devices are needed and not allowed."""
    if not question.groups and len(question.devices) > 1:
        raise PlanError(
            f"planner {planner} gives layers to several devices together, which is not allowed "
            "here: use --planner ftpipehd or pp, which do not"
        )


def refuse_kinds(question: Question, planner: str) -> None:
    """PlanError where the devices compute with different things, and none waits for the others.

    Arguments:
        planner: its name, and what it does.
    """
    cost = question.cost
    if cost.may_share(question.devices):
        return
    named = ", ".join(f"{cost.name(d)}: {cost.devices[d].compute}" for d in question.devices)
    raise PlanError(
        f"planner {planner}, but devices that compute with different things ({named}) share "
        "layers in whole rounds only: use --mode sync, --planner auto, or --device cpu on all"
    )


def refuse_short_models(question: Question, planner: str, *, straight: bool = False) -> None:
    """PlanError where there are fewer units than stages that must exist.

    Arguments:
        straight: the planner gives every device its own layers.
    """
    part = inner_part(question)
    ends = 2 if part.private else 0
    stages = ends + (len(part.devices) if straight else 1)
    if stages <= question.cost.unit_count:
        return
    what = (
        "gives every device its own layers"
        if straight
        else "needs a layer between the first and the last, which --private keeps on one device"
    )
    raise PlanError(
        f"planner {planner} {what}, but the model has {question.cost.unit_count} layers for "
        f"{stages} parts: use --planner auto, which leaves devices out"
    )
