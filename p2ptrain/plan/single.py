"""The whole model on one device: the reference that `auto` must never be slower than."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.plan.draft import draft_pipeline
from p2ptrain.plan.judge import Judge, Judged
from p2ptrain.plan.split import BatchSplit


def best_singles(
    judge: Judge, splits: Sequence[BatchSplit], devices: Sequence[int]
) -> dict[int, Judged]:
    """The fastest split of every device that can hold the whole model, by device.

    Give only the holder where raw data must not leave it.
    """
    best: dict[int, Judged] = {}
    for device in devices:
        drafts = [
            draft_pipeline(judge.cost, split, (0, judge.cost.unit_count), (device,))
            for split in splits
        ]
        found = judge.best_of([draft for draft in drafts if draft is not None])
        if found is not None:
            best[device] = judge.exact(found.draft)
    return best
