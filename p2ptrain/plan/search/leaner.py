"""The best plan with no deeper warm-up than its time needs.

A search follows time alone, and many depths have the same. Who keeps fewer micro-batches in flight
needs less memory for the same round, so depths beyond the usual ones must gain something. The usual
ones stay: they hide what a model of a household does not know.
"""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.plan.draft import Draft, usual_depths
from p2ptrain.plan.shared.judge import Judge, Judged


def leaner(judge: Judge, best: Judged) -> Judged:
    """`best`, its depths lowered towards the usual ones while that makes no round slower.

    One with split backwards stays: its memory is what it holds, not its depths.
    """
    draft = best.draft
    if draft.held:
        return best
    usual = usual_depths(draft.groups, draft.split.micro_batches, judge.cost.mode)
    least = replace(draft, warmup=tuple(map(min, usual, draft.warmup)))
    if least == draft:
        return best
    if _as_fast(judge, least, best):
        draft = least
    for p in reversed(range(len(draft.warmup))):  # the last first: no depth grows to the next
        draft = _lowered(judge, best, draft, p, least.warmup[p])
    found = judge.exact(draft)
    return best if best.beats(found) else found


def _lowered(judge: Judge, best: Judged, draft: Draft, p: int, usual: int) -> Draft:
    """`draft` with the depth of stage p lowered, found by halving, to `usual` at the lowest."""
    low = max((usual, *draft.warmup[p + 1 : p + 2]))
    while low < draft.warmup[p]:
        middle = (low + draft.warmup[p]) // 2
        other = replace(draft, warmup=(*draft.warmup[:p], middle, *draft.warmup[p + 1 :]))
        if _as_fast(judge, other, best):
            draft = other
        else:
            low = middle + 1
    return draft


def _as_fast(judge: Judge, draft: Draft, best: Judged) -> bool:
    """Whether `draft` is, simulated only where its bound leaves hope."""
    bounded = Judged(judge.bound(draft), draft)
    return not best.beats(bounded) and not best.beats(Judged(judge.seconds(draft), draft))
