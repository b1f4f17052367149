from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.planners.ftpipehd import capacities, partitioned
from p2ptrain.plan.planners.published import Inner, inner_part
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.thorough import examples_of

SPLIT = BatchSplit(8, 2)


def part_of(profile: Profile, cluster: Cluster, *, private: bool = False) -> Inner:
    cost = CostModel(profile, cluster)
    devices = tuple(range(len(cost.devices)))
    return inner_part(Question(Judge(cost, 0), (SPLIT,), devices, private))


def slowest(part: Inner, order: tuple[int, ...], borders: tuple[int, ...]) -> float:
    """The paper's objective for a partition, from its definition; inf where memory is short."""
    cost, samples = part.cost, SPLIT.first_samples
    capacity = capacities(part, SPLIT, order)
    seconds = 0.0
    for n, (first, end) in enumerate(pairwise(borders)):
        if cost.peak_bytes(first, end, samples) > cost.devices[order[n]].memory_bytes:
            return math.inf
        reference = sum(cost.stage_seconds(cost.holder, first, end, samples))
        seconds = max(seconds, capacity[n] * reference)
        if n:
            crossing = 2 * samples * cost.cut_bytes(first)
            seconds = max(seconds, crossing / cost.link(order[n - 1], order[n]).bytes_per_s)
    return seconds


def test_a_device_ten_times_slower_gets_one_unit_of_eleven() -> None:
    eleven = planning_examples.profile([(1.0, 1.0)] * 11)
    devices = ClusterDevice("pc", 10**6, holder=True), ClusterDevice("phone", 10**6, slowdown=10.0)
    plan = make_plan(
        eleven, Cluster(devices, ClusterLink(1e9, 0.0)), PlanRequest(32, 4, "ftpipehd")
    )
    assert [(stage.devices[0].name, stage.units) for stage in plan.stages] == [
        ("pc", (0, 10)),
        ("phone", (10, 11)),
    ]


def test_a_large_output_is_not_cut_on_a_slow_link() -> None:
    """The middle cut is 6 and 6 s of work, but 2·100 / 10 = 20 s of link: 4 and 8 s are less."""
    units = planning_examples.profile([(1.0, 1.0)] * 6).units
    fat = [replace(unit, output_bytes=100 if i == 2 else 1) for i, unit in enumerate(units)]
    profile = replace(planning_examples.profile([(1.0, 1.0)] * 6), units=tuple(fat))
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(10.0, 0.0))
    plan = make_plan(profile, cluster, PlanRequest(8, 1, "ftpipehd"))
    assert plan.stages[0].units in ((0, 2), (0, 4))


def test_devices_stand_in_list_order_the_holder_first() -> None:
    cluster = planning_examples.cluster("m", "z", "a")
    plan = make_plan(
        planning_examples.profile([(1.0, 1.0)] * 6), cluster, PlanRequest(8, 1, "ftpipehd")
    )
    assert [stage.devices[0].name for stage in plan.stages] == ["m", "a", "z"]


def test_private_data_stay_with_the_holder() -> None:
    cluster = planning_examples.cluster("m", "z", "a")
    request = PlanRequest(8, 1, "ftpipehd", private=True)
    plan = make_plan(planning_examples.profile([(1.0, 1.0)] * 6), cluster, request)
    assert [(stage.devices[0].name, stage.units) for stage in plan.stages] == [
        ("m", (0, 1)),
        ("a", (1, 3)),
        ("z", (3, 5)),
        ("m", (5, 6)),
    ]


def test_more_devices_than_units_are_refused() -> None:
    cluster = planning_examples.cluster("a", "b", "c")
    with pytest.raises(PlanError, match="2 layers for 3 parts: use --planner auto"):
        make_plan(planning_examples.profile([(1, 1)] * 2), cluster, PlanRequest(8, 1, "ftpipehd"))
    with pytest.raises(PlanError, match="3 layers for 4 parts"):
        make_plan(
            planning_examples.profile([(1, 1)] * 3),
            cluster,
            PlanRequest(8, 1, "ftpipehd", private=True),
        )


def test_memory_that_rules_out_the_list_order_changes_it() -> None:
    """The holder comes first in the list, but has room for the small last unit only."""
    units = [
        replace(unit, parameter_bytes=0 if i == 1 else 100)
        for i, unit in enumerate(planning_examples.profile([(1.0, 1.0)] * 2).units)
    ]
    profile = replace(planning_examples.profile([(1.0, 1.0)] * 2), units=tuple(units))
    devices = ClusterDevice("a", 10, holder=True), ClusterDevice("b", 1000)
    plan = make_plan(
        profile, Cluster(devices, planning_examples.FREE), PlanRequest(8, 1, "ftpipehd")
    )
    assert [stage.devices[0].name for stage in plan.stages] == ["b", "a"]


@settings(max_examples=examples_of(10), deadline=None, derandomize=True)
@given(planning_examples.profiles(), planning_examples.clusters())
def test_no_partition_in_list_order_has_a_faster_slowest_part(
    profile: Profile, cluster: Cluster
) -> None:
    part = part_of(profile, cluster)
    count, units = len(part.devices), part.unit_count
    assume(count <= units)
    every = [(0, *cuts, units) for cuts in combinations(range(1, units), count - 1)]
    best = min(slowest(part, part.devices, borders) for borders in every)
    assume(math.isfinite(best))
    draft = partitioned(part, SPLIT)
    assert draft is not None
    assert draft.devices == part.devices
    assert slowest(part, part.devices, draft.borders) == pytest.approx(best)
