"""The best plan found, with split backwards where that pays (`schedule.py`).

A plan that is best in 1F1B need not be the best one to split: with the way back out of the bubble,
deeper pipelines and fewer, larger micro-batches become worth their while. So it is annealed with
every draft judged as if its backwards were split.

The first stage gains nothing from splitting, because no stage waits for its input gradients; only
where several devices sum its gradients can those travel while weight gradients are computed. How
many micro-batches a stage holds decides how long its weight gradients can wait for an idle moment.
As many as the first stage has in flight in any case, for every stage, are ZB-H1 and ZB-H2 of Qi et
al. 2023 (section 2.3), depending on how deep that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, split_backwards, split_usually
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.annealing import annealed
from p2ptrain.plan.types.request import Schedule

SPLIT_TASKS, VARIANT_TASKS = 80_000, 10_000
"""Simulated tasks for the first look, and for ways to split what is found."""

SPLIT_WORTH = 0.99
"""Memory and simplicity are given up: splitting must gain a hundredth."""


def with_split(question: Question, best: Judged) -> Judged:
    """`best`, or the best plan with split backwards that annealing finds from it on.

    Split are those of a draft that is faster by a hundredth, or, where the question asks for the
    zero-bubble schedule, in any case.
    """
    if question.schedule is Schedule.ONE_F_ONE_B or not question.cost.can_split:
        return best
    judge = SplitJudge(question.cost, int(SPLIT_TASKS * question.effort))
    start = judge.best_of([best.draft, *judge.depths(best.draft)]) or best
    found = annealed(question, judge, start)
    variants = SplitJudge(question.cost, int(VARIANT_TASKS * question.effort))
    split = _exact(variants, [found.draft, best.draft])
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
