"""The search for the fastest pipeline.

Straight pipelines by the dynamic programme over subsets (`straight.py`) and pipelines of groups
along orders of the devices (`segments.py`) are the starts; changes of structure, shares and depths
lead on from the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.climb import climb_coarse, climb_sizes
from p2ptrain.plan.search.fine_moves import deeper
from p2ptrain.plan.search.segments import promising_splits, segment_candidates
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.search.straight import StraightSearch
from p2ptrain.plan.search.structure_moves import taking_in
from p2ptrain.plan.types.allocation import BatchSplit

MIN_TASKS, PAIR_TASKS, MAX_TASKS = 100_000, 100, 2_500_000
"""The budget grows with the pairs of devices, up to a limit: about 1 s for 64 of them."""

STARTS_SHARE = 0.5
"""Part of the budget for starts; the rest is for changes."""

MANY_UNITS, MANY_UNITS_TASKS = 64, 25_000
"""Of models of more units the named planners take their time, and searching gets less."""

PROMISING = 2
"""Micro-batch sizes for which groups are searched."""

CLIMBED = 6
"""Starts that are improved."""

WAITING = 1.02
"""A round so much above its bound may gain by deeper warm-ups."""

MAX_RESIZED = 100
"""Devices times units up to which other micro-batch sizes are tried at the end."""

FEW = 4
"""Changes looked at for each device left out once the budget is used up."""


@dataclass(frozen=True, slots=True)
class PipelineSearch:
    """One search."""

    question: Question
    drafter: Drafter
    straight: StraightSearch

    @classmethod
    def of(cls, question: Question) -> PipelineSearch:
        """Of that question, with its own judge."""
        return cls(question, Drafter(question), StraightSearch(question))

    @property
    def judge(self) -> Judge:
        """The question's judge."""
        return self.question.judge

    def run(self, best: Judged | None) -> Judged | None:
        """The fastest pipeline found, or `best` where none is faster."""
        self.judge.budget_tasks = self._budget_tasks()
        starts = self._starts(best)
        left = self.judge.budget_tasks
        climbed_starts = max(1, round(CLIMBED * self.question.effort))
        for i, start in enumerate(starts[:climbed_starts]):
            reserve = int(left * (1 - (i + 1) / climbed_starts))
            climbed = climb_coarse(self.judge, self.drafter, start, self.question.devices, reserve)
            if best is None or climbed.seconds < best.seconds:
                best = climbed
        if best is None:
            return None
        if self.question.min_micro_batch is None or self._size > MAX_RESIZED:
            return best
        return climb_sizes(self.judge, self.drafter, best, self.question.min_micro_batch)

    def _budget_tasks(self) -> int:
        least = MIN_TASKS if self.judge.cost.unit_count <= MANY_UNITS else MANY_UNITS_TASKS
        tasks = min(least + PAIR_TASKS * len(self.question.devices) ** 2, MAX_TASKS)
        return int(tasks * self.question.effort)

    @property
    def _size(self) -> int:
        """What drafting and simulating a change grows with."""
        return len(self.question.devices) * self.judge.cost.unit_count

    def drafts_with(self, device: int, best: Judged) -> list[Draft]:
        """Drafts in which `device` has a part: the one of least bound is worth judging."""
        known = [d for d in self.straight.pool if device in d.devices and len(d.devices) > 1]
        drafts = [*known, *self._changed_to_use(device, best.draft)]
        shared = [draft for draft in drafts if len(draft.devices) > 1] or drafts
        return [min(shared, key=self.judge.bound)] if shared else []

    def _changed_to_use(self, device: int, draft: Draft) -> Iterator[Draft]:
        changes = taking_in(draft, device, self.question)
        for borders, stages in islice(changes, FEW if self.judge.exhausted else None):
            yield from self.drafter.drafts(draft.split, borders, stages)

    def _starts(self, best: Judged | None) -> list[Judged]:
        """Different drafts, fastest first."""
        judge, budget = self.judge, self.judge.budget_tasks
        kept = int(budget * STARTS_SHARE)
        judge.budget_tasks -= kept  # the straight search may use up what it sees
        starts = self.straight.winners(best)
        judge.budget_tasks += kept
        if self.question.groups:
            for split in promising_splits(self.question, PROMISING):
                drafts = list(segment_candidates(self.question, split))
                starts += self._simulated(drafts, int(budget * (1 - STARTS_SHARE) / 2))
        return _unlike(starts)

    def _simulated(self, drafts: Sequence[Draft], reserve_tasks: int) -> list[Judged]:
        """Those of least bound, as far as the budget goes, and one at least."""
        found: list[Judged] = []
        for draft in sorted(drafts, key=self.judge.bound):
            if found and self.judge.budget_tasks <= reserve_tasks:
                break
            judged = Judged(self.judge.seconds(draft), draft)
            found.append(judged)
            if self._size <= MAX_RESIZED and judged.seconds > WAITING * self.judge.bound(draft):
                found += [Judged(self.judge.seconds(d), d) for d in deeper(self.judge.cost, draft)]
        return found


def _unlike(starts: Sequence[Judged]) -> list[Judged]:
    """The fastest with and without groups of every micro-batch size, then of every structure."""
    first: dict[tuple[BatchSplit, bool], Judged] = {}
    others: dict[tuple[BatchSplit, tuple[frozenset[int], ...]], Judged] = {}
    for start in sorted(starts, key=lambda judged: judged.seconds):
        split, groups = start.draft.split, start.draft.groups
        first.setdefault((split, start.draft.is_straight), start)
        others.setdefault((split, tuple(frozenset(group.devices) for group in groups)), start)
    kept = list(first.values())
    return [*kept, *(start for start in others.values() if start not in kept)]
