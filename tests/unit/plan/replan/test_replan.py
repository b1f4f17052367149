from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PlanError
from p2ptrain.plan.cost.check_plan import WorkloadShare, check_memory, check_plan
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.replan.migration import PAUSE_TOLERANCE
from p2ptrain.plan.replan.replan import Replanned, living_cluster, replan, respipe
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.simulation.simulate import draft_of
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.weight_versions import depths_of
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_examples import quick_request
from tests.support.thorough import examples_of

FAST = ClusterLink(1e9, 0.0)
TWELVE = planning_examples.profile([(1.0, 1.0)] * 12, parameter_bytes=50, activation_bytes=5)
REQUEST = quick_request(32, 1, groups=False)


def units_of(plan: Plan) -> dict[str, tuple[int, int]]:
    return {stage.devices[0].name: stage.units for stage in plan.stages}


def three(**memory: int) -> Cluster:
    devices = tuple(
        ClusterDevice(name, memory.get(name, planning_examples.PLENTY), holder=name == "a")
        for name in "abc"
    )
    return Cluster(devices, FAST)


@cache
def thirds() -> Plan:
    plan = make_plan(TWELVE, three(), REQUEST)
    assert [stage.units for stage in plan.stages] == [(0, 4), (4, 8), (8, 12)]
    return plan


@pytest.mark.parametrize("change", [partial(replan, planner=make_plan), respipe])
def test_where_depths_are_to_be_full_they_stay_so(change: Callable[..., Replanned]) -> None:
    """A stage that has less in flight for want of memory would have other delays than before."""
    request = quick_request(8, mode=PlanMode.ASYNC, full_depths=True, groups=False)
    found = []
    for seed in range(3):
        profile, cluster = planning_examples.tight_household(seed, 6, 4, least_part=0.3)
        with suppress(PlanError):
            plan = make_plan(profile, cluster, request)
            for dead in plan.device_names - {cluster.holder.name}:
                with suppress(PlanError):
                    found.append(change(profile, cluster, plan, request, dead=[dead]).plan)
    assert found
    for plan in found:
        assert tuple(s.warmup for s in plan.stages) == depths_of([1] * len(plan.stages))


def test_the_dead_devices_work_is_spread_evenly_and_few_units_travel() -> None:
    """old  4 4 4, the middle one dies: its units are on the next device, two of them move on."""
    plan = thirds()
    first, dead, last = (stage.devices[0].name for stage in plan.stages)
    assert dead != "a", "the holder is at an end"
    found = replan(TWELVE, three(), plan, REQUEST, dead=[dead], planner=make_plan)
    assert units_of(found.plan) == {first: (0, 6), last: (6, 12)}
    assert [(m.unit, m.sender, m.receiver) for m in found.migration.moves] == [
        (4, last, first),
        (5, last, first),
    ]
    assert found.migration.size_bytes == 2 * 100
    assert f'without "{dead}"' in found.reason
    assert found.plan.found_by == "replan"


SLOW = ClusterLink(100.0, 0.0)
"""A unit of `TWELVE` is a second under way."""
SOON = 60.0


def five(slowdowns: Sequence[float] = (1.0,) * 5) -> Cluster:
    devices = tuple(
        ClusterDevice(name, planning_examples.PLENTY, holder=name == "a", slowdown=slowdown)
        for name, slowdown in zip("abcde", slowdowns, strict=True)
    )
    return Cluster(devices, SLOW)


def test_in_a_pause_a_plan_that_can_begin_at_once_goes_before_a_faster_one() -> None:
    """Each stage's copy is with the next one, so that cuts can move up without a byte."""
    model, cluster = planning_examples.profile([(1.0, 2.0)] * 28, parameter_bytes=50), five()
    request = quick_request(4, 1, groups=False)  # few micro-batches: uneven cuts cost little
    plan = planning_examples.straight_plan(
        BatchSplit(4, 1),
        ("a", (0, 5), 4),
        ("b", (5, 12), 4),
        ("c", (12, 19), 4),
        ("d", (19, 24), 2),
        ("e", (24, 28), 1),
        planner="auto",
    )
    dead = "c"
    held = place_replicas(plan).without([dead])
    ask = partial(
        replan, model, cluster, plan, request, dead=[dead], replicas=held, planner=make_plan
    )
    usual, found = ask(), ask(repay_seconds=SOON)
    assert found.migration.seconds == 0 < usual.migration.seconds
    slower = found.plan.predicted.round_seconds / usual.plan.predicted.round_seconds
    assert slower <= 1 + PAUSE_TOLERANCE


def test_an_unchanged_household_keeps_its_plan_and_moves_nothing() -> None:
    plan = thirds()
    found = replan(TWELVE, three(), plan, REQUEST, planner=make_plan)
    assert found.plan.stages == plan.stages
    assert found.migration.size_bytes == 0
    assert "nothing changed" in found.reason


def test_a_slowed_device_hands_units_to_its_neighbours() -> None:
    plan = thirds()
    middle = plan.stages[1].devices[0].name
    devices = tuple(replace(d, slowdown=4.0) if d.name == middle else d for d in three().devices)
    found = replan(TWELVE, replace(three(), devices=devices), plan, REQUEST, planner=make_plan)
    first, end = units_of(found.plan).get(middle, (0, 0))
    assert end - first <= 2
    assert found.plan.predicted.round_seconds < 32 * 2 * 8


def test_a_joined_device_is_taken_in_where_it_pays() -> None:
    small = living_cluster(three(), ["c"])
    plan = make_plan(TWELVE, small, REQUEST)
    found = replan(TWELVE, three(), plan, REQUEST, planner=make_plan)
    assert set(units_of(found.plan)) == {"a", "b", "c"}
    assert found.migration.size_bytes == 4 * 100


def test_memory_decides_who_takes_over() -> None:
    plan = thirds()
    tight = three(c=TWELVE.units[0].parameter_bytes * 3 * 5 + 25)
    found = replan(TWELVE, tight, plan, REQUEST, dead=["b"], planner=make_plan)
    assert units_of(found.plan)["c"][1] - units_of(found.plan)["c"][0] <= 5


def test_constraints_hold_in_the_new_plan() -> None:
    plan = thirds()
    capped = replace(REQUEST, caps={"c": 0.25})
    found = replan(TWELVE, three(), plan, capped, dead=["b"], planner=make_plan)
    cost = CostModel(TWELVE, living_cluster(three(), ["b"]))
    parts = WorkloadShare(TWELVE).parts(draft_of(found.plan, cost))
    assert parts.get(cost.index("c"), 0.0) <= 0.25
    devices = tuple(replace(d, slowdown=40.0) if d.name == "c" else d for d in three().devices)
    slow = replace(three(), devices=devices)
    free = replan(TWELVE, slow, plan, REQUEST, planner=make_plan)
    assert "c" not in units_of(free.plan)
    forced = replan(
        TWELVE, slow, plan, replace(REQUEST, required=frozenset({"c"})), planner=make_plan
    )
    assert "c" in units_of(forced.plan)
    only = replan(
        TWELVE, three(), plan, replace(REQUEST, only=frozenset({"a", "c"})), planner=make_plan
    )
    assert set(units_of(only.plan)) <= {"a", "c"}


def test_a_dead_holder_is_said_to_be_waited_for() -> None:
    with pytest.raises(PlanError, match="a, which has the data, is gone"):
        replan(TWELVE, three(), thirds(), REQUEST, dead=["a"], planner=make_plan)


def test_a_lost_unit_is_named() -> None:
    plan = thirds()
    held = place_replicas(plan, chain=False)
    with pytest.raises(PlanError, match="are lost"):
        replan(TWELVE, three(), plan, REQUEST, dead=["b"], replicas=held, planner=make_plan)


def test_a_private_plan_stays_private_when_everyone_else_is_gone_and_when_they_return() -> None:
    private = replace(REQUEST, private=True)
    plan = make_plan(TWELVE, three(), private)
    assert {stage.devices[0].name for stage in plan.stages} > {"a"}
    alone = replan(
        TWELVE,
        three(),
        plan,
        private,
        dead=["b", "c"],
        replicas=place_replicas(plan, global_at="a"),
        planner=make_plan,
    )
    assert units_of(alone.plan) == {"a": (0, 12)}
    back = replan(TWELVE, three(), alone.plan, private, planner=make_plan)
    check_plan(back.plan, TWELVE, three(), private=True)
    assert back.plan.predicted.round_seconds < alone.plan.predicted.round_seconds


def test_a_group_goes_on_without_its_dead_member_and_nothing_travels() -> None:
    cluster = three()
    shares = (DeviceShare("b", 2), DeviceShare("c", 2))
    request = quick_request(32, 4)
    base = make_plan(TWELVE, cluster, replace(request, groups=False, only=frozenset("ab")))
    plan = replace(
        base,
        left_out=(),
        stages=(
            PlannedStage((0, 4), (DeviceShare("a", 4),), 3),
            PlannedStage((4, 12), shares, 1, Allocation.SAMPLES),
        ),
    )
    found = replan(TWELVE, cluster, plan, request, dead=["c"], planner=make_plan)
    check_plan(found.plan, TWELVE, living_cluster(cluster, ["c"]))
    assert {m.sender for m in found.migration.moves} <= {"a", "b"}
    handed = respipe(TWELVE, cluster, plan, request, dead=["c"])
    assert units_of(handed.plan) == {"a": (0, 4), "b": (4, 12)}
    assert handed.migration.size_bytes == 0


def test_respipe_hands_everything_to_the_successor() -> None:
    plan = thirds()
    first, dead, last = (stage.devices[0].name for stage in plan.stages)
    handed = respipe(TWELVE, three(), plan, REQUEST, dead=[dead])
    assert units_of(handed.plan) == {first: (0, 4), last: (4, 12)}
    assert handed.migration.size_bytes == 0
    with pytest.raises(PlanError, match="do not fit the memory"):
        respipe(TWELVE, three(**{last: 1200}), plan, REQUEST, dead=[dead])


Question = tuple[Profile, Cluster, Plan, PlanRequest, list[str]]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """A plan of a random household, and who is dead."""
    profile = draw(planning_examples.profiles(most_units=6))
    cluster = draw(planning_examples.clusters(most_devices=4))
    request = quick_request(
        draw(st.sampled_from([4, 7, 8])),
        draw(st.sampled_from([1, 2, 4])),
        private=draw(st.booleans()),
        groups=draw(st.booleans()),
    )
    try:
        plan = make_plan(profile, cluster, request)
    except PlanError:
        assume(False)
    others = [device.name for device in cluster.devices if not device.holder]
    dead = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    slowdowns = [draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in cluster.devices]
    devices = tuple(
        replace(device, slowdown=slowdown)
        for device, slowdown in zip(cluster.devices, slowdowns, strict=True)
    )
    return profile, replace(cluster, devices=devices), plan, request, dead


@given(questions())
@settings(derandomize=True, deadline=None, max_examples=examples_of(10))
def test_new_plans_are_valid_fit_and_use_no_dead_device(question: Question) -> None:
    profile, cluster, plan, request, dead = question
    held = place_replicas(plan, global_at=cluster.holder.name)
    try:
        found = replan(profile, cluster, plan, request, dead=dead, replicas=held, planner=make_plan)
    except PlanError:
        with pytest.raises(PlanError):  # then nothing fits at all
            make_plan(
                profile,
                living_cluster(cluster, dead),
                replace(request, micro_batch=plan.micro_batch),
            )
        return
    left = living_cluster(cluster, dead)
    check_plan(found.plan, profile, left, private=request.private)
    check_memory(found.plan.predicted.peak_bytes, left)
    assert found.plan.split == plan.split
    assert {name for move in found.migration.moves for name in (move.sender, move.receiver)} <= {
        device.name for device in left.devices
    }
    turned = replace(cluster, devices=cluster.devices[::-1])
    again = replan(profile, turned, plan, request, dead=dead, replicas=held, planner=make_plan)
    assert again == found


def test_a_plan_that_was_not_private_becomes_so() -> None:
    private = replace(REQUEST, private=True)
    found = replan(TWELVE, three(), thirds(), private, planner=make_plan)
    check_plan(found.plan, TWELVE, three(), private=True)
