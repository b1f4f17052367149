"""The search where there are too many structures to estimate each.

Straight pipelines by the dynamic programme over subsets (`straight.py`) and pipelines of groups
along orders of the devices (`segments.py`) are the starts; changes of structure, shares and depths
lead on from the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from p2ptrain.plan.climb import climb_coarse
from p2ptrain.plan.coarse import taking_in
from p2ptrain.plan.draft import Draft
from p2ptrain.plan.drafting import Drafter
from p2ptrain.plan.judge import Judge, Judged
from p2ptrain.plan.planner import Question
from p2ptrain.plan.segments import promising_splits, segment_candidates
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.straight import StraightSearch

LEAST_TASKS, PAIR_TASKS, MOST_TASKS = 100_000, 250, 6_000_000
"""The budget grows with the pairs of devices, up to a limit: about 2 s for 64 of them."""
STARTS_SHARE = 0.5
"""Part of the budget for starts; the rest is for changes."""
PROMISING = 3
"""Micro-batch sizes for which groups are searched."""
CLIMBED = 3
"""Starts that are improved."""
FEW = 4
"""Changes looked at for each device left out once the budget is used up."""


@dataclass(frozen=True, slots=True)
class LargeSearch:
    """One search."""

    question: Question
    drafter: Drafter
    straight: StraightSearch

    @property
    def judge(self) -> Judge:
        """The question's judge."""
        return self.question.judge

    def run(self, best: Judged | None) -> Judged | None:
        """The fastest pipeline found, or `best` where none is faster."""
        devices = len(self.question.devices)
        self.judge.budget_tasks = min(LEAST_TASKS + PAIR_TASKS * devices**2, MOST_TASKS)
        starts = self._starts(best)
        left = self.judge.budget_tasks
        for i, start in enumerate(starts[:CLIMBED]):
            reserve = int(left * (1 - (i + 1) / CLIMBED))
            climbed = climb_coarse(self.judge, self.drafter, start, self.question.devices, reserve)
            if best is None or climbed.seconds < best.seconds:
                best = climbed
        return best

    def drafts_with(self, device: int, best: Judged) -> list[Draft]:
        """Drafts in which `device` has a part: the one of least bound is worth judging."""
        known = [d for d in self.straight.pool if device in d.devices and len(d.devices) > 1]
        drafts = [*known, *self._changed_to_use(device, best.draft)]
        shared = [draft for draft in drafts if len(draft.devices) > 1] or drafts
        return [min(shared, key=self.judge.bound)] if shared else []

    def _changed_to_use(self, device: int, draft: Draft) -> Iterator[Draft]:
        changes = taking_in(draft, device, self.drafter.rules)
        for borders, stages in islice(changes, FEW if self.judge.exhausted else None):
            yield from self.drafter.drafts(draft.split, borders, stages)

    def _starts(self, best: Judged | None) -> list[Judged]:
        """Different drafts, fastest first."""
        judge, budget = self.judge, self.judge.budget_tasks
        kept = int(budget * STARTS_SHARE)
        judge.budget_tasks -= kept  # the straight search may use up what it sees
        starts = self.straight.winners(best)
        judge.budget_tasks += kept
        if self.drafter.rules.groups:
            for split in promising_splits(self.question, PROMISING):
                drafts = [
                    draft
                    for draft in segment_candidates(self.question, split)
                    if self.drafter.rules.allow(draft)
                ]
                found = judge.best_of(drafts, None, int(budget * (1 - STARTS_SHARE) / 2))
                if found is not None:
                    starts.append(found)
        return _unlike(sorted(starts, key=lambda judged: judged.seconds))


def _unlike(starts: Sequence[Judged]) -> list[Judged]:
    """The first with groups and the first without of every micro-batch size."""
    kept: dict[tuple[BatchSplit, bool], Judged] = {}
    for start in starts:
        kept.setdefault((start.draft.split, start.draft.is_straight), start)
    return list(kept.values())
