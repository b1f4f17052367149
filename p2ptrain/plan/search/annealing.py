"""Simulated annealing: out of the local optimum in which a climb ends.

Climbing from a few good starts ends where no single change helps, often some hundredths above what
two changes would reach, of which the first alone makes it worse. So small and large changes are
drawn at random; a slower draft is kept for a while, the less likely the slower it is and the
later (Kirkpatrick, Gelatt and Vecchi, 1983).

    kept      ─┐    ┌─┐
    draft's    └────┘ └──┐  ┌┐
    seconds              └──┘└────────┐
               hot                cold└─ climbed ─►

A draft whose bound is already too slow is refused without a simulation. The random numbers come
from a seed, so the same question has the same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from random import Random
from typing import Any, TypeVar

from p2ptrain.plan.cost.draft import Draft, StageGroup, draft_groups
from p2ptrain.plan.problem.candidates import neighbouring_splits
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.climb import (
    change_tasks,
    changed_depths,
    changed_layouts,
    climb_fine,
    spare_devices,
    wanted_depths,
)
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.search.structure_moves import Layout, coarse_changes

SEED = 1

HOT, COLD = 0.03, 0.002
"""How much slower, as a part, a draft may typically be at the beginning and at the end."""

SMALL, HOT_SMALL = 100, 0.06
"""Up to so many devices times units, where structures are few, it begins hotter."""

CLIMB_SHARE = 0.15
"""Of the budget, kept for the climb at the end."""

SIZED, DEEPENED, SHIFTED = 0.12, 0.18, 0.25
"""How often what is drawn is the micro-batch's size, a depth, or a share, a border or an order;
otherwise it is the structure."""

MIN_TASKS, MAX_TASKS, TASKS_BY_SIZE, MAX_UNITS = 150_000, 500_000, 3_000, 64
"""The budget grows with devices times units (of more units than so many: with these)."""

WIDE_TASKS = 120_000
"""Of many devices, whose simulation takes longer a task."""

_T = TypeVar("_T")


def annealing_tasks(question: Question) -> int:
    """The budget that annealing a question's answer is worth; 0 where it is not."""
    devices, units = len(question.devices), min(question.cost.unit_count, MAX_UNITS)
    if devices == 1:
        return 0
    tasks = min(max(MIN_TASKS, TASKS_BY_SIZE * devices * units), MAX_TASKS)
    if question.is_wide:
        tasks = WIDE_TASKS
    return int(tasks * question.effort)


def annealed(question: Question, judge: Judge, start: Judged) -> Judged:
    """`start` or the fastest draft found from it on; uses the judge's budget up.

    Args:
        judge: of the same cost model as the question's; it may judge in another way.
    """
    return _Annealing(question, Drafter(question, judge), Random(SEED)).run(start)


class _Changes:
    """What can be changed in a draft, listed once: it is drawn from until another one is kept."""

    def __init__(self) -> None:
        self._draft: Draft | None = None
        self._listed: dict[str, Sequence[Any]] = {}

    def of(self, draft: Draft, what: str, changes: Callable[[Draft], Iterable[_T]]) -> Sequence[_T]:
        """All `changes` of `draft`, which are called `what`."""
        if draft is not self._draft:
            self._draft = draft
            self._listed.clear()
        if what not in self._listed:
            self._listed[what] = list(changes(draft))
        return self._listed[what]


@dataclass(frozen=True, slots=True)
class _Annealing:
    question: Question
    drafter: Drafter
    random: Random
    changes: _Changes = field(default_factory=_Changes)

    def run(self, start: Judged) -> Judged:
        judge = self.drafter.judge
        budget = judge.budget_tasks
        kept = int(budget * CLIMB_SHARE)
        best = now = start
        size = len(self.question.devices) * self.question.cost.unit_count
        hot = HOT_SMALL if size <= SMALL else HOT
        while judge.budget_tasks > kept:
            cooled = (budget - judge.budget_tasks) / (budget - kept)
            warmth = hot * (COLD / hot) ** cooled
            slowest = now.seconds * (1 - warmth * log(1 - self.random.random()))
            judge.budget_tasks -= change_tasks(now.draft)
            draft = self._drawn(now.draft)
            if draft is None or draft == now.draft or judge.bound(draft) >= slowest:
                continue
            seconds = judge.seconds(draft)
            if seconds < slowest:
                now = Judged(seconds, draft)
                if now.beats(best):
                    best = now
        return climb_fine(judge, self.drafter, best, reserve_tasks=0)

    def _drawn(self, draft: Draft) -> Draft | None:
        """A draft one change away; None where what was drawn does not fit or may not be."""
        drawn = self.random.random()
        if drawn < SIZED:
            return self._sized(draft)
        drawn -= SIZED
        if drawn < DEEPENED:
            depths = self.changes.of(draft, "depths", changed_depths)
            return self._changed(draft, draft.borders, draft.groups, self._one(depths))
        drawn -= DEEPENED
        if drawn < SHIFTED:
            layout = self._one(self.changes.of(draft, "layouts", changed_layouts))
            if layout is not None:
                return self._changed(draft, *layout)
        return self._structured(draft)

    def _sized(self, draft: Draft) -> Draft | None:
        if self.question.min_micro_batch is None:
            return None
        split = self._one(neighbouring_splits(draft.split, self.question.min_micro_batch))
        return None if split is None else self._one(self.drafter.resized(draft, split))

    def _structured(self, draft: Draft) -> Draft | None:
        layout = self._one(self.changes.of(draft, "structures", self._structures))
        return None if layout is None else self._one(self.drafter.drafts(draft.split, *layout))

    def _structures(self, draft: Draft) -> Iterable[Layout]:
        spare = spare_devices(self.drafter, draft, self.question.devices)
        return coarse_changes(draft, spare, self.question)

    def _changed(
        self,
        draft: Draft,
        borders: tuple[int, ...],
        groups: tuple[StageGroup, ...],
        depths: tuple[int, ...] | None = None,
    ) -> Draft | None:
        wanted = depths or wanted_depths(draft, groups)
        changed = draft_groups(self.drafter.judge.cost, draft.split, borders, groups, wanted)
        return changed if changed is not None and self.question.allow(changed) else None

    def _one(self, choices: Iterable[_T]) -> _T | None:
        several = choices if isinstance(choices, Sequence) else list(choices)
        return self.random.choice(several) if several else None
