from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from p2ptrain.plan.cost.cost_model import cost_model
from p2ptrain.plan.replan.hysteresis import (
    MEMORY_SECONDS,
    MIN_GAIN,
    ReplanAction,
    ReplanDecision,
    weigh_replan,
)
from p2ptrain.plan.replan.migration import NOTHING
from p2ptrain.plan.replan.replan import Replanned, replan
from p2ptrain.plan.simulation.simulate import draft_of, simulate_draft
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_examples import quick_request

TWELVE = planning_examples.profile([(0.01, 0.01)] * 12, parameter_bytes=500, activation_bytes=5)
REQUEST = quick_request(32, 1, groups=False)
EVERY_SECONDS = 20.0
"""Between two looks."""


def household(b_slowdown: float = 1.0, bytes_per_s: float = 1e9) -> Cluster:
    devices = (
        ClusterDevice("a", planning_examples.PLENTY, holder=True),
        ClusterDevice("b", planning_examples.PLENTY, slowdown=b_slowdown),
        ClusterDevice("c", planning_examples.PLENTY),
    )
    return Cluster(devices, ClusterLink(bytes_per_s, 0.0))


@pytest.fixture(name="plan", scope="module")
def _plan() -> Plan:
    return make_plan(TWELVE, household(), REQUEST)


def decide(
    cluster: Cluster,
    plan: Plan,
    remaining_rounds: int | None = None,
    moved_seconds_ago: Sequence[float] = (),
    profile: Profile = TWELVE,
) -> ReplanDecision:
    """Whether to leave `plan` for what is found where devices are as in `cluster`."""
    cost = cost_model(profile, cluster, REQUEST)
    now = simulate_draft(cost, draft_of(plan, cost)).round_seconds
    found = replan(profile, cluster, plan, REQUEST, planner=make_plan)
    return weigh_replan(plan, now, found, remaining_rounds, moved_seconds_ago)


def test_it_stays_where_nothing_changed(plan: Plan) -> None:
    decision = decide(household(), plan)
    assert decision.action is ReplanAction.STAY
    assert decision.plan is plan


def test_it_stays_where_the_gain_is_small(plan: Plan) -> None:
    decision = decide(household(1.02), plan)
    assert decision.action is ReplanAction.STAY


def test_it_moves_when_a_device_is_four_times_slower_and_back_again(plan: Plan) -> None:
    there = decide(household(4.0), plan)
    assert there.action is ReplanAction.MOVE
    assert there.gain is not None
    assert there.gain > 1.0
    back = decide(household(), there.plan)
    assert back.action is ReplanAction.MOVE


def test_a_pause_that_is_not_repaid_is_not_made(plan: Plan) -> None:
    slow = household(4.0)
    assert decide(slow, plan, remaining_rounds=100).action is ReplanAction.MOVE
    last = decide(slow, plan, remaining_rounds=0)
    assert last.action is ReplanAction.STAY
    assert "changing takes" in last.reason
    heavy = replace(TWELVE, units=tuple(replace(u, parameter_bytes=10**11) for u in TWELVE.units))
    assert decide(slow, plan, profile=heavy).action is ReplanAction.STAY


def test_recent_moves_raise_the_gain_asked_for(plan: Plan) -> None:
    slow = household(4.0)
    ages = [1.0] * 6
    held_back = decide(slow, plan, moved_seconds_ago=ages)
    assert held_back.action is ReplanAction.STAY
    assert "320%" in held_back.reason
    forgotten = [MEMORY_SECONDS + 1] * 6
    assert decide(slow, plan, moved_seconds_ago=forgotten).action is ReplanAction.MOVE


@pytest.mark.parametrize(("gain", "action"), [(1.15, ReplanAction.STAY), (1.2, ReplanAction.MOVE)])
def test_several_stages_must_gain_more_than_they_are_doubted_over_a_stage_of_all(
    plan: Plan, gain: float, action: ReplanAction
) -> None:
    whole = make_plan(TWELVE, household(), quick_request(32, 1, planner="dp"))
    found = Replanned(plan, NOTHING, 0, "moved")
    seconds = gain * plan.predicted.round_seconds
    assert weigh_replan(whole, seconds, found).action is action
    assert weigh_replan(with_more_under_way(plan), seconds, found).action is ReplanAction.MOVE


def with_more_under_way(plan: Plan) -> Plan:
    """Another plan of the same stages."""
    first, *others = plan.stages
    return replace(plan, stages=(replace(first, warmup=first.warmup + 1), *others))


def moves(plan: Plan, speeds: list[float]) -> int:
    """How often the plan changes when every look finds another speed of device b."""
    moved: list[float] = []
    for look, slowdown in enumerate(speeds):
        now = look * EVERY_SECONDS
        ages = [now - then for then in moved]
        decision = decide(household(slowdown), plan, moved_seconds_ago=ages)
        if decision.action is ReplanAction.MOVE:
            plan = decision.plan
            moved.append(now)
    return len(moved)


def test_measuring_noise_moves_nothing(plan: Plan) -> None:
    random = Random(3)
    assert moves(plan, [random.uniform(0.95, 1.05) for _ in range(10)]) <= 1


def test_a_flickering_device_causes_few_moves(plan: Plan) -> None:
    """The gain is at most 4-fold, so at most log2(3 / MIN_GAIN) + 1 moves in MEMORY_SECONDS."""
    random = Random(5)
    speeds = [random.choice((1.0, 4.0)) * random.uniform(0.95, 1.05) for _ in range(40)]
    windows = 40 * EVERY_SECONDS / MEMORY_SECONDS
    assert MIN_GAIN * 2**7 > 4
    assert 1 <= moves(plan, speeds) <= 7 * windows


def test_a_device_that_stays_slow_causes_one_move(plan: Plan) -> None:
    random = Random(7)
    assert moves(plan, [4 * random.uniform(0.97, 1.03) for _ in range(15)]) == 1
