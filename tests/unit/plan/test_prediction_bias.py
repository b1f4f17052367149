from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import PlanError
from p2ptrain.plan.compare_kinds import (
    DOUBT,
    NOT_THERE,
    bias_checked_change,
    bias_checked_plan,
    bias_corrected_seconds,
)
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from tests.support import planning_examples
from tests.support.planning_examples import quick_request

REQUEST = quick_request(batch_size=4)
PROFILE = planning_examples.profile([(1.0, 1.0), (1.0, 1.0)])
CLUSTER = planning_examples.cluster("a", "b")
ONE = (PlannedStage((0, 2), (DeviceShare("a", 1), DeviceShare("b", 1)), 1),)
ALONE = (PlannedStage((0, 2), (DeviceShare("a", 2),), 1),)
TWO = (
    PlannedStage((0, 1), (DeviceShare("a", 2),), 2),
    PlannedStage((1, 2), (DeviceShare("b", 2),), 1),
)


def _plan(stages: tuple[PlannedStage, ...], seconds: float, planner: str) -> Plan:
    return Plan(planner, BatchSplit(4, 2), stages, Predicted(seconds, 4 / seconds, {}))


def _chosen(
    whole_seconds: float | None, request: PlanRequest = REQUEST, alone_seconds: float | None = None
) -> Plan:
    """Of a pipeline that takes a second, a stage of all devices, and a device; None = no plan."""

    def planner(_profile: Profile, _cluster: Cluster, asked: PlanRequest) -> Plan:
        if asked.planner == "auto":
            return replace(_plan(TWO, 1.0, "auto"), mode=request.mode)
        assert asked == replace(request, planner=asked.planner)
        stages, seconds = {"dp": (ONE, whole_seconds), "single": (ALONE, alone_seconds)}[
            asked.planner
        ]
        if seconds is None:
            raise PlanError("too little memory")
        return _plan(stages, seconds, asked.planner)

    return bias_checked_plan(planner, PROFILE, CLUSTER, request)


def test_a_stage_of_all_devices_is_taken_unless_a_pipeline_gains_more_than_it_is_doubted() -> None:
    near, far = _chosen(1 + 0.9 * DOUBT), _chosen(1 + 1.1 * DOUBT)
    assert near.stages == ONE
    assert (near.planner, near.found_by) == ("auto", "dp")
    assert near.predicted.round_seconds == pytest.approx(1 + 0.9 * DOUBT)
    assert far == _plan(TWO, 1.0, "auto")


@pytest.mark.parametrize(
    ("present", "whole_seconds", "stays"),
    [(ONE, 1 + 0.9 * DOUBT, True), (ONE, 1 + 1.1 * DOUBT, False), (TWO, 1.0, False)],
)
def test_after_a_death_a_stage_of_all_stays_one_unless_a_pipeline_gains_more_than_that(
    present: tuple[PlannedStage, ...], whole_seconds: float, *, stays: bool
) -> None:
    """Device c had no part: it would have to fetch everything."""

    def planner(_profile: Profile, _cluster: Cluster, asked: PlanRequest) -> Plan:
        assert asked == replace(REQUEST, planner="dp", only=frozenset({"a", "b"}))
        return replace(_plan(ONE, whole_seconds, "dp"), left_out=(LeftOut("c", "not allowed"),))

    before, found = _plan(present, 1.0, "auto"), _plan(TWO, 1.0, "auto")
    cluster = planning_examples.cluster("a", "b", "c")
    changed = bias_checked_change(planner, PROFILE, cluster, REQUEST, before, found)
    if stays:
        assert changed.stages == ONE
        assert (changed.planner, changed.found_by) == ("auto", "dp")
        assert changed.left_out == (LeftOut("c", NOT_THERE),)
    else:
        assert changed == found


@pytest.mark.parametrize(("alone_seconds", "found_by"), [(1.05, "single"), (1.09, "dp")])
def test_auto_does_not_fall_behind_one_device_for_that(alone_seconds: float, found_by: str) -> None:
    chosen = _chosen(1.08, alone_seconds=alone_seconds)
    assert (chosen.planner, chosen.found_by) == ("auto", found_by)
    assert chosen.predicted.round_seconds == min(1.08, alone_seconds)


def test_a_pipeline_stays_where_not_everybody_can_hold_the_model() -> None:
    assert _chosen(None).stages == TWO


def test_without_a_barrier_nobody_waits_so_nothing_is_doubted() -> None:
    free = _chosen(1.0, replace(REQUEST, mode=PlanMode.ASYNC))
    assert free.stages == TWO
    assert bias_corrected_seconds(free) == free.predicted.round_seconds


def test_a_planner_asked_for_by_name_is_obeyed() -> None:
    def planner(_profile: Profile, _cluster: Cluster, asked: PlanRequest) -> Plan:
        assert asked.planner == "pp"
        return _plan(TWO, 1.0, "pp")

    asked = replace(REQUEST, planner="pp")
    assert bias_checked_plan(planner, PROFILE, CLUSTER, asked) == _plan(TWO, 1.0, "pp")


@pytest.mark.parametrize(("gain", "stages"), [(0.9, 1), (1.1, 2)])
def test_a_processor_is_taken_beside_a_card_where_it_gains_more_than_doubt(
    gain: float, stages: int
) -> None:
    a, b = CLUSTER.devices
    mixed = replace(CLUSTER, devices=(replace(a, compute="card"), b))

    def planner(_profile: Profile, _cluster: Cluster, asked: PlanRequest) -> Plan:
        if asked.planner == "auto":
            return _plan(TWO, 1.0, "auto")
        assert asked.planner == "single"
        alone = _plan(ALONE, 1 + gain * DOUBT, "single")
        return replace(alone, left_out=(LeftOut("b", "it is slower"),))

    plan = bias_checked_plan(planner, PROFILE, mixed, REQUEST)
    assert len(plan.stages) == stages
    assert [out.reason for out in plan.left_out] == [
        "with it a step may gain 10.8%, less than a prediction is worth"
    ][: 2 - stages]
