"""The best plan found, with split backwards where that pays (`schedule.py`).

A plan that is best in 1F1B need not be the best one to split: with the way back out of the bubble,
deeper pipelines and fewer, larger micro-batches become worth their while. So the same search runs
once more, with less effort, from that plan on, and its result is climbed from; every draft is
judged with its backwards split.

The first stage gains nothing from splitting, because no stage waits for its input gradients; only
where several devices sum its gradients can those travel while weight gradients are computed. How
many micro-batches a stage holds decides how long its weight gradients can wait for an idle moment.
As many as the first stage has in flight in any case, for every stage, are ZB-H1 and ZB-H2 of Qi et
al. 2023 (section 2.3), depending on how deep that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, split_backwards, split_usually
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.annealing import annealed
from p2ptrain.plan.search.climb import climb_fine, climb_sizes
from p2ptrain.plan.search.shares import Drafter
from p2ptrain.plan.types.request import Schedule

EFFORT = 0.3
"""Of the second search, by that of the first."""

SEARCH_TASKS, CLIMB_TASKS, VARIANT_TASKS = 100_000, 40_000, 10_000
"""Simulated tasks for a small question's search, the climb, and ways to split what it finds."""

SPLIT_WORTH = 0.99
"""Memory and simplicity are given up: splitting must gain a hundredth."""


class SplitSearch(Protocol):
    """A search of one question."""

    def run(self, best: Judged | None) -> Judged | None:
        """The fastest draft found, or `best` where none is faster."""


def with_split(
    question: Question, best: Judged, search: Callable[[Question], SplitSearch]
) -> Judged:
    """`best`, or the best plan with split backwards that `search` of the question finds.

    Split are those of a draft that is faster by a hundredth, or, where the question asks for the
    zero-bubble schedule, in any case.
    """
    if question.schedule is Schedule.ONE_F_ONE_B or not question.cost.can_split:
        return best
    split = _searched(question, best, search)
    needed = question.schedule is Schedule.ZERO_BUBBLE
    if split is None or not (needed or split.seconds < best.seconds * SPLIT_WORTH):
        return best
    return split


def annealed_split(question: Question, best: Judged, tasks: int) -> Judged:
    """`best`, whose backwards are split, or what annealing for so many tasks finds."""
    judge = SplitJudge(question.cost, tasks)
    whole = replace(best.draft, held=())
    found = annealed(question, judge, Judged(judge.seconds(whole), whole))
    variants = SplitJudge(question.cost, int(VARIANT_TASKS * question.effort))
    split = _exact(variants, [found.draft])
    return best if split is None or split.seconds >= best.seconds else split


def split_planner_answer(question: Question, draft: Draft) -> Draft:
    """A named planner's draft, split as the question asks; its depths stay."""
    judge = question.judge
    if question.schedule is Schedule.ONE_F_ONE_B or not question.cost.can_split:
        return draft
    if question.schedule is Schedule.ZERO_BUBBLE:
        return split_usually(judge.cost, draft)
    found = best_split(judge, draft)
    pays = found is not None and judge.exact(found.draft).seconds < SPLIT_WORTH * (
        judge.exact(draft).seconds
    )
    return found.draft if found is not None and pays else draft


def _searched(
    question: Question, best: Judged, search: Callable[[Question], SplitSearch]
) -> Judged | None:
    """The best split draft that search and climb lead to, or a split of `best`."""
    effort = question.effort
    judge = SplitJudge(question.cost, int(SEARCH_TASKS * effort * EFFORT))
    start = judge.best_of([best.draft, *judge.depths(best.draft)])
    found = search(replace(question, judge=judge, effort=effort * EFFORT)).run(start)
    starts = {one.draft: one for one in (start, found) if one is not None}
    climbed = []
    for one in starts.values():
        judge.budget_tasks = int(CLIMB_TASKS * effort / len(starts))
        climbed.append(_climbed(question, judge, one).draft)
    variants = SplitJudge(question.cost, int(VARIANT_TASKS * effort))
    return _exact(variants, [*climbed, best.draft])


def _climbed(question: Question, judge: Judge, start: Judged) -> Judged:
    drafter = Drafter(question, judge)
    climbed = climb_fine(judge, drafter, start, judge.budget_tasks // 2)
    if question.min_micro_batch is None:
        return climbed
    return climb_sizes(judge, drafter, climbed, question.min_micro_batch)


def _exact(judge: Judge, drafts: list[Draft]) -> Judged | None:
    """The fastest way to split any of `drafts`, simulated whole."""
    found = [split for draft in drafts if (split := best_split(judge, draft)) is not None]
    return min(
        (judge.exact(split.draft) for split in found), key=lambda one: one.seconds, default=None
    )


class SplitJudge(Judge):
    """Judges drafts as they are once their backwards are split as usual."""

    def bound(self, draft: Draft) -> float:
        """Seconds that its round takes at least."""
        return super().bound(self._split(draft))

    def seconds(self, draft: Draft) -> float:
        """Seconds of its round; of a long round extrapolated from two short ones."""
        return super().seconds(self._split(draft))

    def exact(self, draft: Draft) -> Judged:
        """The whole round simulated; the draft stays as it was given."""
        return replace(super().exact(self._split(draft)), draft=draft)

    def _split(self, draft: Draft) -> Draft:
        return draft if draft.held else split_usually(self.cost, draft)


HOLD_WORTH = 0.999
"""Holding more costs memory: it must gain a thousandth."""


def split_variants(cost: CostModel, draft: Draft) -> Iterator[Draft]:
    """The ways to split that are worth a look, those that hold least first."""
    levels = (1, draft.warmup[0], 2 * draft.warmup[0], draft.split.micro_batches)
    shared = len(draft.groups[0].devices) > 1
    found = (
        split_backwards(cost, draft, level, first=first)
        for level in levels
        for first in ((False, True) if shared else (False,))
    )
    for variant in dict.fromkeys(found):
        if variant.held:
            yield variant


def best_split(judge: Judge, draft: Draft, reserve_tasks: int = 0) -> Judged | None:
    """The fastest way to split `draft`; None where there is none.

    Simulated are those whose bound leaves hope, while the budget lasts.
    """
    best: Judged | None = None
    for variant in split_variants(judge.cost, draft):
        if best is not None:
            hopeless = judge.bound(variant) >= best.seconds * HOLD_WORTH
            if hopeless or judge.budget_tasks <= reserve_tasks:
                continue
        seconds = judge.seconds(variant)
        if best is None or seconds < best.seconds * HOLD_WORTH:
            best = Judged(seconds, variant)
    return best
