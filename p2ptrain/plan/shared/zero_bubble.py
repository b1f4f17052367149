"""Which stages split their backward, and how many micro-batches they may hold (`schedule.py`).

Nobody waits for the first stage, so that it gains nothing from sending early what it does not send;
only where several devices sum its gradients can those travel while weight gradients are computed.

How much a stage holds decides how long its weight gradients can wait for an idle moment. As many
micro-batches as the first stage has in flight in any case, for every stage, are ZB-H1 and ZB-H2 of
Qi et al. 2023 (section 2.3), depending on how deep that is.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft, split_backwards
from p2ptrain.plan.shared.judge import Judge, Judged

WORTH = 0.999
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
            hopeless = judge.bound(variant) >= best.seconds * WORTH
            if hopeless or judge.budget_tasks <= reserve_tasks:
                continue
        seconds = judge.seconds(variant)
        if best is None or seconds < best.seconds * WORTH:
            best = Judged(seconds, variant)
    return best
