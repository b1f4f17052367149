"""A lower bound on a draft's round, hundreds of times cheaper than simulating it.

Every term is a chain of things that cannot overlap in the plain cost model, so no simulation is
ever faster; with enough micro-batches the largest is usually within a few per cent of it. For each
stage p, with `fill` the first micro-batch's way to it and `drain` the last one's way back:

    compute     fill + all its forwards and backwards + drain
    depth       fill + (M-1)//K_p + 1 round trips from p to the end and back + drain
    interface   all bytes a device sends, or receives, in a round
    feed        two pieces are under way at a time: (M-1)//2 + 1 feed transfers in a row

Where a stage's backward is split, its weight gradients are in no way back and in no round trip, but

    compute     fill + all its tasks and weight gradients, with nothing behind them
    drain       ends with stage 0's last weight gradients

`group_bound.py` has them lane by lane; a straight pipeline's stages have one lane each.
"""

from __future__ import annotations

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft
from p2ptrain.plan.simulation.group_bound import group_bound
from p2ptrain.plan.simulation.overlapped_bound import steady_bound


def lower_bound(cost: CostModel, draft: Draft) -> float:
    """Seconds that a round of `draft` takes at least."""
    if cost.overlap is not None:
        return steady_bound(cost, draft)
    return group_bound(cost, draft)
