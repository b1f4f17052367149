"""Other systems' plans for comparisons: sound groups, borders and shares."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import draft_groups
from p2ptrain.plan.simulation.simulate import round_seconds
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tools.baselines import (
    balanced_borders,
    dealing_groups,
    equal_stages,
    replicated_pipeline,
)


def model(times: list[float], outputs: list[int] | None = None) -> Profile:
    count = len(times)
    sizes = outputs or [0] * count
    return Profile(
        model="test",
        input_bytes=0,
        target_bytes=0,
        units=tuple(Unit(f"u{i}", 100, sizes[i], 10) for i in range(count)),
        optimizer_state_ratio=1.0,
        times=TimeTable((1,), (UnitTimes(tuple(times), tuple(2 * t for t in times)),)),
    )


def equal_devices(count: int, memory_bytes: int = 10**9) -> Cluster:
    devices = tuple(ClusterDevice(f"d{i}", memory_bytes, holder=i == 0) for i in range(count))
    return Cluster(devices, ClusterLink(1000.0, 0.001))


@given(
    times=st.lists(st.floats(0.01, 1.0), min_size=3, max_size=7),
    outputs=st.lists(st.integers(0, 1000), min_size=7, max_size=7),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_borders_minimise_the_slowest_stage_or_link(
    times: list[float], outputs: list[int], replicas: list[int]
) -> None:
    cost = CostModel(model(times, outputs[: len(times)]), equal_devices(sum(replicas) + 1))
    split, count = BatchSplit(1, 1), len(times)

    def slowest(borders: tuple[int, ...]) -> float:
        stages = [
            3 * sum(times[a:b]) / r for (a, b), r in zip(pairwise(borders), replicas, strict=True)
        ]
        links = [
            outputs[cut - 1] / 1000.0 / min(replicas[p], replicas[p + 1])
            for p, cut in enumerate(borders[1:-1])
        ]
        return max(stages + links)

    every = [(0, *cuts, count) for cuts in combinations(range(1, count), len(replicas) - 1)]
    found = tuple(balanced_borders(cost, split, replicas))
    assert found in every
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_replicas_deal_whole_micro_batches_evenly() -> None:
    first, second = dealing_groups(BatchSplit(16, 1), (15, 1))
    assert first.shares == (2, *(1,) * 14)
    assert first.deals
    assert second.devices == (15,)


def test_replicas_without_a_micro_batch_are_left_out() -> None:
    (group,) = dealing_groups(BatchSplit(2, 1), (3,))
    assert group.devices == (0, 1)
    assert group.shares == (1, 1)


def test_borders_are_at_least_as_good_as_the_balanced_ones() -> None:
    cost = CostModel(model([0.3, 0.1, 0.4, 0.2, 0.5], [900, 5, 400, 30, 0]), equal_devices(3))
    split = BatchSplit(6, 1)
    found = replicated_pipeline(cost, split, (2, 1))
    start = draft_groups(
        cost, split, balanced_borders(cost, split, (2, 1)), dealing_groups(split, (2, 1))
    )
    assert start is not None
    assert found.samples_per_s is not None
    assert found.samples_per_s >= split.batch_size / round_seconds(cost, start)


def test_what_does_not_fit_has_no_speed() -> None:
    cost = CostModel(model([0.3, 0.1]), equal_devices(2, memory_bytes=200))
    assert replicated_pipeline(cost, BatchSplit(4, 1), (1, 1)).samples_per_s is None


def test_equal_stages_do_not_see_a_slow_device() -> None:
    devices = tuple(
        ClusterDevice(f"d{i}", 10**9, 10.0 if i == 2 else 1.0, i == 0) for i in range(3)
    )
    cost = CostModel(model([0.1] * 6), Cluster(devices, ClusterLink(1e9, 0.0)))
    outcome = equal_stages(cost, BatchSplit(64, 1), (0, 1, 2), reference=0)
    assert outcome.draft is not None
    assert outcome.draft.borders == (0, 2, 4, 6)
