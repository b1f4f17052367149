"""Plans of one's own for the household in memory: groups of any shape, whatever pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from p2ptrain.coordinator import plan_cluster
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest

DEALT = Allocation.MICRO_BATCHES


@dataclass(frozen=True)
class Stage:
    """`shares` of the next devices; what they count; whether the backward is split.

    Attributes:
        slack: so many micro-batches more than the warm-up may be without their weight gradients.
        turns: where there are several, the next round begins before all sums are there, as far as
            updates go ahead; sums turn in the middle of the stage.
    """

    shares: tuple[int, ...]
    allocation: Allocation = Allocation.SAMPLES
    slack: int | None = None
    turns: bool = True


def divided(*shares: int) -> Stage:
    """A stage that divides each micro-batch; one number is a device alone."""
    return Stage(shares)


def dealt(*shares: int) -> Stage:
    """A stage that deals whole micro-batches."""
    return Stage(shares, DEALT)


def device_count(stages: Sequence[Stage]) -> int:
    """How many devices the plan takes."""
    return sum(len(stage.shares) for stage in stages)


def force(
    monkeypatch: pytest.MonkeyPatch, stages: Sequence[Stage], names: Sequence[str] = "abcdefgh"
) -> None:
    """Let every coordinator of this test plan just these stages, over equal parts of the units."""
    monkeypatch.setattr(plan_cluster, "make_plan", partial(plan, stages, names=names))


def plan(
    stages: Sequence[Stage],
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    *,
    names: Sequence[str] = "abcdefgh",
) -> Plan:
    """As `make_plan` would, but for its choice; the stages' devices in the order of `names`."""
    assert request.micro_batch is not None
    names = [name for name in names if any(name == device.name for device in cluster.devices)]
    split = BatchSplit(request.batch_size, request.micro_batch)
    peaks = {device.name: 0 for device in cluster.devices}
    predicted = Predicted(round_seconds=1.0, samples_per_s=1.0, peak_bytes=peaks)
    return Plan("auto", split, _planned(stages, len(profile.units), split, names), predicted)


def _planned(
    stages: Sequence[Stage], units: int, split: BatchSplit, names: Sequence[str]
) -> tuple[PlannedStage, ...]:
    free = iter(names)
    planned = []
    for index, stage in enumerate(stages):
        borders = (index * units // len(stages), (index + 1) * units // len(stages))
        members = tuple(DeviceShare(next(free), share) for share in stage.shares)
        depth = min(split.micro_batches, device_count(stages[index:]) + len(stages) - index - 1)
        held = None if stage.slack is None else min(split.micro_batches, depth + stage.slack)
        turn = sum(borders) // 2 + 1 if stage.turns and len(members) > 1 else None
        planned.append(
            PlannedStage(borders, members, depth, stage.allocation, held=held, turn=turn)
        )
    return tuple(planned)
