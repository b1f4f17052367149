"""What lower bounds must know of split backwards (`schedule.ZeroBubble`)."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import Draft


@dataclass(frozen=True, slots=True)
class Weights:
    """Seconds of a stage's weight gradients; all 0 where its backward is not split.

    Attributes:
        all: of a round.
        forced: of those that its last forward waits for.
        last: of the last micro-batch.
    """

    all: float = 0.0
    forced: float = 0.0
    last: float = 0.0


def weight_seconds(cost: CostModel, draft: Draft) -> list[Weights]:
    """Of every stage of a straight pipeline."""
    split, found = draft.split, []
    for p, device in enumerate(draft.devices):
        if not draft.splits(p):
            found.append(Weights())
            continue
        full, last = (
            cost.split_seconds(device, *draft.units[p], samples)[2]
            for samples in (split.first_samples, split.last_samples)
        )
        count = split.micro_batches
        found.append(Weights((count - 1) * full + last, (count - draft.held[p]) * full, last))
    return found


def task_seconds(
    cost: CostModel, draft: Draft, p: int, device: int, samples: int
) -> tuple[float, float]:
    """(forward, backward) of stage p; of a split backward only the part of the inputs."""
    if draft.splits(p):
        return cost.split_seconds(device, *draft.units[p], samples)[:2]
    return cost.stage_seconds(device, *draft.units[p], samples)
