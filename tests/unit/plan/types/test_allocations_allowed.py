"""Requests that allow groups only one way to divide their work, asked of every planner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_request
from p2ptrain.plan.planner_registry import PLANNERS
from p2ptrain.plan.replan.replan import replan
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.plan import Plan, PlannedStage
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

DEALING = frozenset({Allocation.MICRO_BATCHES})
DIVIDING = frozenset({Allocation.SAMPLES})
MODEL, HOUSEHOLD = planning_examples.household(5, units=8, devices=4)


def _groups(plan: Plan) -> Iterator[PlannedStage]:
    return (stage for stage in plan.stages if len(stage.devices) > 1)


@pytest.mark.parametrize("allowed", [DEALING, DIVIDING])
@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_groups_divide_only_as_allowed(planner: str, allowed: frozenset[Allocation]) -> None:
    request = PlanRequest(64, 8, planner, allocations=allowed, effort=0.03)
    plan = make_plan(MODEL, HOUSEHOLD, request)
    assert {stage.allocation for stage in _groups(plan)} <= allowed
    if planner in ("dp", "hybrid"):
        assert list(_groups(plan))


@pytest.mark.parametrize(("units", "devices"), [(8, 4), (4, 7)])
def test_auto_still_finds_groups_that_deal(units: int, devices: int) -> None:
    model, household = planning_examples.household(5, units, devices)
    request = PlanRequest(256, 8, allocations=DEALING, effort=0.03)
    plan = make_plan(model, household, request)
    assert {stage.allocation for stage in _groups(plan)} == {Allocation.MICRO_BATCHES}
    straight = make_plan(model, household, replace(request, groups=False))
    assert plan.predicted.round_seconds < straight.predicted.round_seconds


@pytest.mark.parametrize(
    ("micro_batch", "advice"),
    [
        (32, "use a smaller --micro-batch, a larger batch or"),
        (1, "every device: use a larger batch or"),
    ],
)
def test_dp_says_what_is_missing_where_it_cannot_deal(micro_batch: int, advice: str) -> None:
    request = PlanRequest(2 * micro_batch, micro_batch, "dp", allocations=DEALING)
    said = rf"cannot take turns at 2 or fewer micro-batches.*{advice}"
    with pytest.raises(PlanError, match=said):
        make_plan(MODEL, HOUSEHOLD, request)


def test_a_plan_is_held_against_what_was_allowed() -> None:
    request = PlanRequest(64, 8, "dp", allocations=DIVIDING)
    plan = make_plan(MODEL, HOUSEHOLD, request)
    with pytest.raises(PlanError, match="divides samples in part 0"):
        check_request(plan, MODEL, replace(request, allocations=DEALING))


def test_some_way_must_be_allowed() -> None:
    with pytest.raises(OptionError, match="some way to divide"):
        PlanRequest(64, allocations=frozenset())
    PlanRequest(64, groups=False, allocations=frozenset())


def test_replanning_keeps_to_what_is_allowed() -> None:
    model, household = planning_examples.household(5, units=4, devices=7)
    request = PlanRequest(256, 8, allocations=DEALING, effort=0.03)
    plan = make_plan(model, household, request)
    dead = plan.stages[-1].devices[0].name
    found = replan(model, household, plan, request, dead=[dead], planner=make_plan)
    assert {stage.allocation for stage in _groups(found.plan)} <= DEALING
