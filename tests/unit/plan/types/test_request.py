"""Requests are checked before planning, and plans against them afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.cost.check_plan import check_request
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink, unknown_device
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.request import PlanRequest, all_but
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples

MODEL = planning_examples.profile([(1.0, 1.0)] * 4)
THREE = Cluster(
    (
        ClusterDevice("laptop", planning_examples.PLENTY, 1.0, holder=True),
        ClusterDevice("pi", planning_examples.PLENTY, 2.0),
        ClusterDevice("nas", planning_examples.PLENTY, 3.0),
    ),
    ClusterLink(1e9, 0.0),
)
PLAN = Plan(
    "pipedream",
    planning_examples.BatchSplit(8, 4),
    (
        PlannedStage((0, 3), (DeviceShare("laptop", 3), DeviceShare("pi", 1)), 2),
        PlannedStage((3, 4), (DeviceShare("nas", 4),), 1),
    ),
    Predicted(0.0, 0.0, {}),
)  # parts: laptop 9/16, pi 3/16, nas 1/4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 10**12 + 1}, "batch_size must be at most 1,000,000,000,000, found 1000"),
        ({"caps": {"pi": 0.0}}, 'cap of "pi" must lie above 0 and at most 1: 0.0'),
        ({"caps": {"pi": 1.1}}, 'cap of "pi" must lie above 0 and at most 1: 1.1'),
        ({"caps": {"pi": float("nan")}}, 'cap of "pi"'),
        (
            {"only": frozenset({"pi"}), "required": frozenset({"nas"})},
            "nas is required, but it is excluded",
        ),
    ],
)
def test_requests_that_make_no_sense(fields: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(PlanRequest(8), **fields)  # type: ignore[arg-type]


def test_all_but_some() -> None:
    assert all_but(THREE, ["laptop"]) == {"pi", "nas"}
    with pytest.raises(OptionError, match='no device "tv"'):
        all_but(THREE, ["tv"])


def test_an_unknown_name_is_answered_by_some_that_are_known() -> None:
    assert str(unknown_device("tv", ["b", "a"])).endswith("(known: a, b)")
    many = [f"device{i}" for i in range(1000)]
    assert str(unknown_device("tv", many)).endswith("device108 and 988 more)")


@pytest.mark.parametrize("field", ["only", "required", "caps"])
def test_names_must_be_in_the_cluster(field: str) -> None:
    value = {"tv": 0.5} if field == "caps" else frozenset({"tv"})
    with pytest.raises(OptionError, match='no device "tv"'):
        make_plan(MODEL, THREE, replace(PlanRequest(8), **{field: value}))  # type: ignore[arg-type]


def test_a_plan_that_obeys_is_left_alone() -> None:
    caps = {"laptop": 9 / 16, "pi": 3 / 16, "nas": 0.25}
    check_request(PLAN, MODEL, PlanRequest(8, required=frozenset(caps), caps=caps))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PlanRequest(8, required=frozenset({"tv"})), '"pipedream" does not use tv'),
        (PlanRequest(8, only=frozenset({"laptop", "pi"})), "uses nas, which"),
        (PlanRequest(8, caps={"nas": 0.2}), "gives nas 0.250 .* than its --cap of 0.2"),
        (PlanRequest(8, groups=False), "gives part 0 to 2 devices"),
    ],
)
def test_a_plan_that_does_not_obey_names_the_device(request_: PlanRequest, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_request(PLAN, MODEL, request_)


def test_caps_that_leave_work_undone() -> None:
    with pytest.raises(PlanError, match=r"allow only 0.9 of the work"):
        make_plan(MODEL, THREE, PlanRequest(8, caps={"laptop": 0.3, "pi": 0.3, "nas": 0.3}))


def test_without_its_holder_a_plan_is_fed_by_it() -> None:
    only = all_but(THREE, ["laptop"])
    plan = make_plan(MODEL, THREE, PlanRequest(8, 1, only=only, effort=0.1))
    used = {device.name for stage in plan.stages for device in stage.devices}
    assert used <= {"pi", "nas"}
    assert plan.left_out[0].name == "laptop"


def test_single_obeys_too() -> None:
    def chosen(request: PlanRequest) -> str:
        return make_plan(MODEL, THREE, request).stages[0].devices[0].name

    assert chosen(PlanRequest(8, planner="single")) == "laptop"
    assert chosen(PlanRequest(8, planner="single", required=frozenset({"nas"}))) == "nas"
    assert chosen(PlanRequest(8, planner="single", caps={"laptop": 0.9})) == "pi"
    with pytest.raises(PlanError, match="forbid that for each device"):
        chosen(PlanRequest(8, planner="single", required=frozenset({"nas", "pi"})))


def test_a_required_device_without_memory_for_any_unit_is_named() -> None:
    model = planning_examples.profile([(1.0, 1.0)] * 4, parameter_bytes=100)
    house = Cluster((*THREE.devices, ClusterDevice("phone", 10)), ClusterLink(1e9, 0.0))
    with pytest.raises(
        PlanError, match=r'phone has 10 bytes, .* "unit0" needs 300 bytes: 290 bytes'
    ):
        make_plan(model, house, PlanRequest(8, required=frozenset({"phone"})))


def test_what_no_plan_obeys_is_reported() -> None:
    """Its two ends alone are half of the work."""
    with pytest.raises(PlanError, match=r"no plan was found where laptop does at most 0.4"):
        make_plan(MODEL, THREE, PlanRequest(8, private=True, caps={"laptop": 0.4}))
