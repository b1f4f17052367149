"""Properties of `auto` on random questions: sound, obedient, monotonic, never beaten."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.check_plan import ROUNDING, check_memory, check_plan, plan_parts
from p2ptrain.plan.planner_registry import PLANNERS
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.equal_devices import equal, vgg_like
from tests.support.planning_questions import tried
from tests.support.thorough import examples_of


def assert_sound(plan: Plan, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
    """Units covered once and in order, shares and depths legal, memory kept, JSON exact."""
    borders = [stage.units for stage in plan.stages]
    assert [first for first, _ in borders] == [0, *(end for _, end in borders[:-1])]
    assert borders[-1][1] == len(profile.units)
    for stage in plan.stages:
        total = plan.micro_batch
        if stage.allocation is Allocation.MICRO_BATCHES:
            total = plan.micro_batches
        assert sum(device.share for device in stage.devices) == total
    check_plan(plan, profile, cluster, private=request.private)
    check_memory(simulate(plan, profile, cluster).peak_bytes, cluster)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(),
    planning_examples.clusters(most_devices=4),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([None, 1, 4]),
    st.data(),
)
def test_constraints_are_obeyed(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    micro_batch: int | None,
    data: st.DataObject,
) -> None:
    names = sorted(device.name for device in cluster.devices)
    request = PlanRequest(
        batch_size,
        micro_batch,
        private=data.draw(st.booleans()),
        required=data.draw(st.frozensets(st.sampled_from(names), max_size=2)),
        caps=data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from([0.3, 0.6]))),
        groups=data.draw(st.booleans()),
    )
    plan = tried(profile, cluster, request)
    if plan is None:
        return
    assert_sound(plan, profile, cluster, request)
    parts = plan_parts(plan, profile)
    assert request.required <= parts.keys()
    assert all(parts.get(name, 0.0) <= cap + ROUNDING for name, cap in request.caps.items())
    assert request.groups or all(len(stage.devices) == 1 for stage in plan.stages)
    assert {out.name for out in plan.left_out} == set(names) - parts.keys()


@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(),
    planning_examples.clusters(),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
)
def test_no_named_planner_is_faster(
    profile: Profile, cluster: Cluster, batch_size: int, micro_batch: int | None, private: bool
) -> None:
    request = PlanRequest(batch_size, micro_batch, private=private)
    auto = tried(profile, cluster, request)
    for name in PLANNERS.keys() - {"auto"}:
        other = tried(profile, cluster, replace(request, planner=name))
        if other is not None:
            assert auto is not None, name
            assert auto.predicted.round_seconds <= other.predicted.round_seconds, name


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_order_of_the_list_does_not_matter(micro_batch: int | None) -> None:
    profile, cluster = planning_examples.household(3, units=6, devices=4)
    shuffled = list(cluster.devices)
    Random(1).shuffle(shuffled)
    request = PlanRequest(32, micro_batch)
    plan = make_plan(profile, cluster, request)
    assert make_plan(profile, replace(cluster, devices=tuple(shuffled)), request) == plan
    assert_sound(plan, profile, cluster, request)


def test_equal_devices_on_fast_links_divide_the_batch() -> None:
    """Data parallelism is the best that four equal devices on free links can do."""
    profile = planning_examples.profile([(1.0, 1.0)] * 4, parameter_bytes=1)
    plan = make_plan(profile, planning_examples.cluster("a", "b", "c", "d"), PlanRequest(64, 4))
    assert plan.predicted.round_seconds == pytest.approx(64 * 8 / 4)


def test_a_required_device_takes_part_however_slow() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 4)
    members = (
        ClusterDevice("laptop", 10**9, holder=True),
        ClusterDevice("watch", 10**9, slowdown=50.0),
    )
    cluster = Cluster(members, ClusterLink(1e9, 0.0))
    plan = make_plan(profile, cluster, PlanRequest(32, 4))
    assert [out.name for out in plan.left_out] == ["watch"]
    forced = make_plan(profile, cluster, PlanRequest(32, 4, required=frozenset({"watch"})))
    assert forced.left_out == ()
    assert forced.predicted.round_seconds > plan.predicted.round_seconds


def test_a_cap_moves_work_to_the_others() -> None:
    profile = planning_examples.profile([(1.0, 1.0)] * 10)
    members = (ClusterDevice("fast", 10**9, 0.2, holder=True), ClusterDevice("slow", 10**9, 1.0))
    cluster = Cluster(members, ClusterLink(1e9, 0.0))
    plan = make_plan(profile, cluster, PlanRequest(40, 4, caps={"fast": 0.5}))
    assert plan_parts(plan, profile) == pytest.approx({"fast": 0.5, "slow": 0.5})


def test_a_device_of_a_group_is_left_out_for_its_gradients() -> None:
    """Summing the parameters over a slow link costs more than the device would save."""
    profile = planning_examples.profile([(1.0, 1.0)], parameter_bytes=10**9, input_bytes=1)
    plan = make_plan(
        profile, planning_examples.cluster("a", "b", link=ClusterLink(1e6, 0.0)), PlanRequest(8, 2)
    )
    (out,) = plan.left_out
    assert " instead of 16.00 s, because " in out.reason
    assert out.reason.endswith(
        "summing its gradients with other devices' takes 1000.00 s in each step"
    )


def test_auto_plans_asynchronously_in_the_window_of_its_replicas() -> None:
    plan = make_plan(vgg_like(), equal(8), PlanRequest(1, mode=PlanMode.ASYNC))
    dealing = [stage for stage in plan.stages if len(stage.devices) > 1]
    assert dealing
    for stage in dealing:
        assert plan.micro_batches % len(stage.devices) == 0


def test_reasons_of_an_asynchronous_plan_speak_of_mini_batches() -> None:
    slow = ClusterDevice("slow", 16 * 10**9, 500.0)
    cluster = Cluster((*equal(2).devices, slow), ClusterLink(1.25e9, 50e-6))
    plan = make_plan(vgg_like(), cluster, planning_examples.quick_request(1, mode=PlanMode.ASYNC))
    (out,) = plan.left_out
    assert out.name == "slow"
    assert out.reason.startswith("with it a batch would take ")
    assert "round" not in out.reason
