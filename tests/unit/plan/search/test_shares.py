"""Shares that let a group finish together."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import StageGroup, UnplacedGroup
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.shares import ShareDivider
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tests.support.planning_examples import FREE, PLENTY, cluster, profile


def random_cost(random: Random, devices: int) -> CostModel:
    """Two units of times that are not linear in the samples, on unlike devices."""
    times = []
    for size in (2, 4, 8):
        forward = tuple(random.uniform(0.5, 1) + 0.3 * size for _ in range(2))
        times.append(UnitTimes(forward, forward))
    units = tuple(Unit(f"unit{i}", 10, 1, 5) for i in range(2))
    members = tuple(
        ClusterDevice(f"d{i}", random.randrange(80, 200), random.uniform(1, 4), i == 0)
        for i in range(devices)
    )
    model = Profile("random", 0, 0, units, 1.0, TimeTable((2, 4, 8), tuple(times)))
    return CostModel(model, Cluster(members, FREE))


def shared(
    cost: CostModel,
    split: BatchSplit,
    units: tuple[int, int],
    allocation: Allocation = Allocation.SAMPLES,
    depth: int = 1,
) -> StageGroup | None:
    """All devices in one stage."""
    devices = tuple(range(len(cost.devices)))
    divider = ShareDivider(Question(Judge(cost, 0), [split], devices))
    return divider.group(split, UnplacedGroup(devices, allocation), units, depth)


def finishing(cost: CostModel, split: BatchSplit, group: StageGroup) -> float:
    """Seconds of the slowest device."""
    if group.deals:
        each = (sum(cost.stage_seconds(d, 0, 2, split.first_samples)) for d in group.devices)
        return max(share * one for share, one in zip(group.shares, each, strict=True))
    return max(
        sum(cost.stage_seconds(d, 0, 2, share))
        for d, share in zip(group.devices, group.shares, strict=True)
    )


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as `parts` numbers above zero."""
    cuts = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, total), strict=True)) for cut in cuts]


@pytest.mark.parametrize("seed", range(12))
def test_no_other_division_finishes_earlier(seed: int) -> None:
    random = Random(seed)
    devices = random.randint(2, 4)
    cost, split = random_cost(random, devices), BatchSplit(24, 12)
    room = [cost.samples_that_fit(0, 2, device.memory_bytes) for device in cost.devices]
    allowed = [
        shares
        for shares in compositions(12, devices)
        if all(share <= most for share, most in zip(shares, room, strict=True))
    ]
    found = shared(cost, split, (0, 2))
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert sum(found.shares) == 12
    best = min(finishing(cost, split, StageGroup(tuple(range(devices)), s)) for s in allowed)
    # Monotone times, as measured ones nearly are: the finishing time is the least possible.
    assert finishing(cost, split, found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_deal_finishes_earlier(seed: int) -> None:
    random = Random(seed)
    cost, split = random_cost(random, 3), BatchSplit(18, 2)
    found = shared(cost, split, (0, 2), Allocation.MICRO_BATCHES)
    assert found is not None
    assert sum(found.shares) == 9
    best = min(
        finishing(cost, split, StageGroup((0, 1, 2), shares, Allocation.MICRO_BATCHES))
        for shares in compositions(9, 3)
    )
    assert finishing(cost, split, found) == pytest.approx(best)


def test_depth_leaves_room_for_more_micro_batches() -> None:
    model = profile([(1.0, 1.0)], activation_bytes=10)
    small = ClusterDevice("b", 50)
    cost = CostModel(model, Cluster((ClusterDevice("a", PLENTY, holder=True), small), FREE))
    split = BatchSplit(60, 10)
    shallow = shared(cost, split, (0, 1), depth=1)
    deep = shared(cost, split, (0, 1), depth=2)
    assert shallow is not None
    assert shallow.shares == (5, 5)
    assert deep is not None
    assert deep.shares == (8, 2)
    assert shared(cost, split, (0, 1), depth=6) is None  # not one sample fits


def test_more_devices_than_shares_is_impossible() -> None:
    cost = CostModel(profile([(1.0, 1.0)]), cluster("a", "b", "c"))
    assert shared(cost, BatchSplit(8, 2), (0, 1)) is None
    dealt = shared(cost, BatchSplit(4, 2), (0, 1), Allocation.MICRO_BATCHES)
    assert dealt is None
