"""Whole searches of `auto`: beside all plans there are, on better households, on 16 devices."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from p2ptrain.plan.search import auto
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_gap import gap, problem
from tests.support.planning_questions import tried
from tools.pipedream_compare import compare, equal_devices

WORSE = 1.01
"""How much worse a better cluster may make the prediction."""


EQUAL = Profile(
    model="vgg16",
    input_bytes=0,
    target_bytes=0,
    units=tuple(Unit(f"u{i}", 1000, 100, 10) for i in range(4)),
    optimizer_state_ratio=1.0,
    times=TimeTable((64,), (UnitTimes((0.01,) * 4, (0.02,) * 4),)),
)


@pytest.mark.parametrize("private", [False, True])
def test_auto_stays_close_to_exhaustive_search(private: bool) -> None:
    """The sample of `gap.py`: own times, tight memory, slow links, ragged batches."""
    options = argparse.Namespace(
        units=5, devices=3, private=private, free=False, straight=False, climbed=4
    )
    gaps = [gap(seed, options) for seed in range(3)]
    assert max(one.gap for one in gaps if one is not None) <= 0.02


def test_sixty_four_units_on_eight_devices_stay_within_the_budget() -> None:
    profile, cluster = planning_examples.household(3, units=64, devices=8)
    plan = make_plan(profile, cluster, PlanRequest(512))
    single = make_plan(profile, cluster, PlanRequest(512, planner="single"))
    assert plan.predicted.round_seconds < 0.5 * single.predicted.round_seconds


def faster_links(cluster: Cluster) -> Cluster:
    """The same with twice the bandwidth everywhere."""
    assert cluster.default_link is not None
    default = replace(cluster.default_link, bytes_per_s=2 * cluster.default_link.bytes_per_s)
    links = {
        pair: replace(link, bytes_per_s=2 * link.bytes_per_s)
        for pair, link in cluster.links.items()
    }
    return replace(cluster, default_link=default, links=links)


def faster_device(cluster: Cluster, place: int) -> Cluster:
    """The same with one device a third faster."""
    devices = list(cluster.devices)
    device = devices[place]
    own = None if device.times is None else device.times.times_slowdown(0.75)
    devices[place] = replace(device, slowdown=0.75 * device.slowdown, times=own)
    return replace(cluster, devices=tuple(devices))


@pytest.mark.parametrize("seed", [0, 2])
def test_a_better_cluster_is_never_planned_worse(seed: int) -> None:
    asked = problem(seed, units=5, devices=3)
    request = PlanRequest(asked.batch_size, asked.micro_batch)
    before = tried(asked.profile, asked.cluster, request)
    if before is None:
        return
    better = [faster_links(asked.cluster), faster_device(asked.cluster, seed)]
    for cluster in better:
        after = make_plan(asked.profile, cluster, request)
        assert after.predicted.round_seconds <= before.predicted.round_seconds * WORSE


@pytest.mark.parametrize("seed", [41, 58])
def test_the_last_stage_of_a_private_plan_is_as_deep_as_helps(seed: int) -> None:
    """With a depth of one there these rounds are 5% longer."""
    options = argparse.Namespace(
        units=4, devices=3, private=True, free=False, straight=False, climbed=4
    )
    found = gap(seed, options)
    assert found is not None
    assert found.gap <= 0.02


def test_by_annealing_plans_become_faster_and_none_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    gained = []
    for seed in range(2):
        profile, cluster = planning_examples.household(seed, 12, 6)
        request = PlanRequest(64, micro_batch=8, effort=0.3)
        with monkeypatch.context() as without:
            without.setattr(auto, "annealing_tasks", lambda question: 0)
            before = make_plan(profile, cluster, request).predicted.round_seconds
        gained.append(before / make_plan(profile, cluster, request).predicted.round_seconds)
    assert min(gained) >= 1.0
    assert max(gained) > 1.0


@pytest.mark.parametrize("mode", [PlanMode.SYNC, PlanMode.ASYNC])
def test_a_row_has_the_published_configuration_and_our_plans(mode: PlanMode) -> None:
    cluster = equal_devices(1e9, 10**9)
    row = compare(EQUAL, "fast", cluster, PlanRequest(1, mode=mode, effort=0.1), rounds=30)
    assert set(row.published) == {"15-1"}
    assert 0 < row.best_published < 16 * 64 / 0.12
    assert row.auto is not None
    assert 0 < row.auto <= 16 * 64 / 0.12
