"""Planning with split backwards: taken where they pay, within memory, and said in the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import alone, draft_groups, peak_bytes, with_held
from p2ptrain.plan.gantt import draw_gantt
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, Schedule
from p2ptrain.plan.types.unit_times import TimeTable
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_examples import quick_request
from tests.unit.plan.simulation.test_zero_bubble import weighed

TWELVE = weighed(
    planning_examples.profile([(0.01, 0.02)] * 12, output_bytes=1000, activation_bytes=1000),
    [8] * 12,
)
"""Half of every backward is gradients of weights."""
THREE = planning_examples.cluster("a", "b", "c", link=ClusterLink(12.5e6, 0.001))
REQUEST = quick_request(64, micro_batch=8, groups=False, overlap=True)
"""With twelve equal units a third of the search finds what all of it does."""


@cache
def planned(**changes: object) -> Plan:
    """For the three devices, by a request that differs so from `REQUEST`."""
    return make_plan(TWELVE, THREE, replace(REQUEST, **changes))  # type: ignore[arg-type]


def without_weights(profile: Profile) -> Profile:
    times = tuple(replace(entry, weight=()) for entry in profile.times.times)
    return replace(profile, times=TimeTable(profile.times.sizes, times))


def test_auto_splits_where_the_runtime_gains_by_it() -> None:
    split, whole = planned(), planned(schedule=Schedule.ONE_F_ONE_B)
    assert [stage.held is not None for stage in split.stages] == [False, True, True]
    assert not whole.is_split
    assert split.predicted.round_seconds < 0.95 * whole.predicted.round_seconds
    simulation = simulate(split, TWELVE, THREE, overlap=True)
    assert simulation.round_seconds == pytest.approx(split.predicted.round_seconds)


def test_the_plain_model_never_splits_by_itself() -> None:
    assert not planned(overlap=False).is_split
    assert planned(overlap=False, schedule=Schedule.AUTO).is_split


def test_weight_times_change_no_plan_that_is_not_split() -> None:
    plain = replace(REQUEST, overlap=False)
    assert planned(overlap=False) == make_plan(without_weights(TWELVE), THREE, plain)


def test_nothing_is_split_without_weight_times() -> None:
    assert not make_plan(without_weights(TWELVE), THREE, REQUEST).is_split
    with pytest.raises(OptionError, match="make it again with p2ptrain profile"):
        make_plan(without_weights(TWELVE), THREE, replace(REQUEST, schedule=Schedule.ZERO_BUBBLE))


def test_splitting_that_gains_nothing_is_not_taken() -> None:
    """What little there is to defer is not worth what splitting costs."""
    little = weighed(TWELVE, [0] * 11 + [1])
    assert not make_plan(little, THREE, REQUEST).is_split
    asked = make_plan(little, THREE, replace(REQUEST, schedule=Schedule.ZERO_BUBBLE))
    assert asked.is_split


def test_a_named_planner_is_split_only_when_asked_and_keeps_its_layout() -> None:
    published = planned(planner="pp")
    asked = planned(planner="pp", schedule=Schedule.ZERO_BUBBLE)
    assert not published.is_split
    assert [stage.held for stage in asked.stages] == [None, 5, 5]
    assert published.stages == tuple(replace(stage, held=None) for stage in asked.stages)


def test_a_device_alone_has_nothing_to_split() -> None:
    assert not planned(planner="single", schedule=Schedule.ZERO_BUBBLE).is_split


@pytest.mark.parametrize("memory_bytes", [33_000, 40_000, 70_000, 100_000, 10**9])
def test_a_stage_holds_no_more_than_memory_allows(memory_bytes: int) -> None:
    cluster = planning_examples.cluster("a", "b", "c", memory_bytes=memory_bytes)
    cost, split = CostModel(TWELVE, cluster), BatchSplit(64, 8)
    draft = draft_groups(cost, split, (0, 4, 8, 12), [alone(split, d) for d in range(3)])
    assert draft is not None
    held = with_held(cost, draft, (0, 8, 8))
    assert held.held[0] == 0
    assert all(held.held[p] >= draft.warmup[p] for p in (1, 2))
    assert max(peak_bytes(cost, held).values()) <= memory_bytes
    assert held.held == (0, 8, 8) or memory_bytes < 4 * 64 * 1000 + 33_000


def test_a_private_holder_has_room_for_both_of_its_ends() -> None:
    profile = replace(TWELVE, target_bytes=8)
    for memory_bytes in (60_000, 150_000):
        devices = (ClusterDevice("a", memory_bytes, holder=True), ClusterDevice("b", 10**9))
        plan = make_plan(
            profile,
            Cluster(devices, ClusterLink(12.5e6, 0.001)),
            replace(REQUEST, private=True, schedule=Schedule.ZERO_BUBBLE),
        )
        assert plan.predicted.peak_bytes["a"] <= memory_bytes


def test_what_a_stage_holds_goes_through_json() -> None:
    plan = planned(schedule=Schedule.ZERO_BUBBLE)
    content = plan.to_json()
    assert "held" not in content["stages"][0]
    assert content["stages"][1]["held"] == plan.stages[1].held
    assert Plan.from_json(content, batch_size=64) == plan
    content["stages"][1]["held"] = 9
    with pytest.raises(OptionError, match=r"stages\[1\]\.held: 9 must lie between its warmup"):
        Plan.from_json(content, batch_size=64)


def test_asynchronous_backwards_are_not_split() -> None:
    with pytest.raises(OptionError, match="works with mode sync only"):
        quick_request(8, mode=PlanMode.ASYNC, schedule=Schedule.AUTO)
    plan = make_plan(TWELVE, THREE, quick_request(8, planner="pp", mode=PlanMode.ASYNC))
    content = plan.to_json()
    content["stages"][0]["held"] = content["stages"][0]["warmup"]
    with pytest.raises(OptionError, match="held: the backward is split in mode sync only"):
        Plan.from_json(content)


def test_a_simulation_follows_the_plan_or_the_schedule_asked_for() -> None:
    plan = planned(planner="pp")
    split = planned(planner="pp", schedule=Schedule.ZERO_BUBBLE)

    def seconds(plan: Plan, schedule: Schedule | None) -> float:
        return simulate(plan, TWELVE, THREE, schedule=schedule).round_seconds

    assert seconds(split, None) == seconds(plan, Schedule.ZERO_BUBBLE)
    assert seconds(plan, None) == seconds(split, Schedule.ONE_F_ONE_B)
    with pytest.raises(OptionError, match="schedule auto is for planners"):
        seconds(plan, Schedule.AUTO)


def test_a_chart_shows_weight_gradients_in_a_colour_of_their_own() -> None:
    plan = planned(schedule=Schedule.ZERO_BUBBLE)
    chart = draw_gantt(simulate(plan, TWELVE, THREE))
    assert chart.count('class="weight"') == 2 * 8 + 1  # two split stages, and the legend
    assert 'class="weight"' not in draw_gantt(
        simulate(plan, TWELVE, THREE, schedule=Schedule.ONE_F_ONE_B)
    )
