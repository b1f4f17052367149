"""What the planners are asked, from what devices have measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pytest

from p2ptrain.coordinator import plan_cluster as household_plan
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice, planner_question
from p2ptrain.coordinator.plan_cluster import PLANNING_EFFORT, plan_cluster, replan_cluster
from p2ptrain.errors import OptionError, PlanError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.messages.plan_request import JobPlanRequest, SharingLimits
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.recovery.compute_kind import ComputeKind
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.unit.holder.planning.test_planner_client import REQUEST, measured_alike


def household(*slowdowns: float, processor: str = "epyc") -> MeasuredCluster:
    names = [f"device-{number}" for number in range(len(slowdowns))]
    candidates = [
        MeasuredDevice(
            name, name, {**measured_alike(slowdown), "processor": processor}, MemoryBudgets(1 << 30)
        )
        for name, slowdown in zip(names, slowdowns, strict=True)
    ]
    links = {pair: ClusterLink(1e9, 0.0001) for pair in permutations(names, 2)}
    return MeasuredCluster(tuple(candidates), links, names[0])


@pytest.mark.parametrize(("processor", "is_shared"), [("epyc", True), ("", False)])
def test_planners_see_the_same_times_of_devices_with_the_same_processor(
    processor: str, is_shared: bool
) -> None:
    profile, cluster = planner_question(REQUEST, household(0.95, 1.05, processor=processor))
    one, other = (device.times for device in cluster.devices)
    assert (one == other) is is_shared
    assert profile.times == one
    assert (cluster.devices[0].overheads == cluster.devices[1].overheads) is is_shared


def test_without_the_holders_own_profile_there_is_no_question() -> None:
    home = household(1.0, 1.0)
    with pytest.raises(PlanError, match="device-0, which has the data, has not measured the model"):
        planner_question(REQUEST, replace(home, candidates=home.candidates[1:]))


def test_a_profile_that_takes_no_time_for_its_processor_time_is_refused_by_name() -> None:
    home = household(1.0, 1.0)
    broken = replace(home.candidates[1], measured={**home.candidates[1].measured, "wall_by_cpu": 0})
    with pytest.raises(OptionError, match=r"profile of device-1\.wall_by_cpu"):
        planner_question(REQUEST, replace(home, candidates=[home.candidates[0], broken]))


@pytest.mark.parametrize(
    ("faster", "sizes"),
    [
        ({"from": 16, "units": [0, 2]}, {4, 15, 16}),
        (None, {4, 16}),
    ],
)
def test_a_gain_with_larger_batches_is_not_promised_to_smaller_ones(
    faster: object, sizes: set[int]
) -> None:
    home = household(1.0, 1.0)
    own = home.candidates[0].measured
    assert set(own["times"]) == {"4", "16"}
    home = replace(
        home,
        candidates=[replace(c, measured={**own, "faster": faster}) for c in home.candidates],
    )
    _, cluster = planner_question(REQUEST, home)
    for device in cluster.devices:
        assert device.times is not None
        assert {size for size in device.times.sizes if 4 <= size <= 16} == sizes


def test_times_of_processors_do_not_grow_as_an_accelerator_s() -> None:
    """Which is not busy yet with the batches that they have measured."""
    home = household(1.0, 1.0)
    own = home.candidates[0].measured
    flat = {**own["times"], "64": own["times"]["16"]}
    card = replace(
        home.candidates[1],
        measured={**own, "times": flat, "processor": "card"},
        compute=ComputeKind("card", "a card"),
    )
    _, cluster = planner_question(REQUEST, replace(home, candidates=[home.candidates[0], card]))
    processor, accelerator = (device.times for device in cluster.devices)
    assert processor is not None
    assert accelerator is not None
    assert sum(accelerator.at(64).forward) == sum(accelerator.at(16).forward)
    assert sum(processor.at(64).forward) > 3 * sum(processor.at(16).forward)
    assert [device.compute for device in cluster.devices] == ["cpu", "card"]


@pytest.mark.parametrize(("repay_seconds", "stages"), [(60.0, 1), (None, 3)])
def test_after_a_death_auto_keeps_a_stage_of_all_and_what_can_wait_is_weighed(
    monkeypatch: pytest.MonkeyPatch, repay_seconds: float | None, stages: int
) -> None:
    """The light re-plan finds a pipeline that seems a twentieth faster."""
    four, three = household(*[1.0] * 4), household(*[1.0] * 3)
    present = replace(plan_cluster(replace(REQUEST, planner="dp"), four), planner="auto")
    asked = replace(REQUEST, micro_batch=present.micro_batch)
    whole = plan_cluster(replace(asked, planner="dp"), three)
    pipeline = plan_cluster(replace(asked, planner="pp"), three)
    seconds = 0.95 * whole.predicted.round_seconds
    predicted = replace(pipeline.predicted, round_seconds=seconds)
    found = replace(pipeline, planner="auto", predicted=predicted)
    monkeypatch.setattr(household_plan, "replan", lambda *_, **__: SimpleNamespace(plan=found))
    replicas = place_replicas(present, chain=False)
    plan = replan_cluster(REQUEST, three, present, replicas, ReplanMethod.LIGHT, repay_seconds)
    assert len(plan.stages) == stages


@pytest.mark.parametrize("recovery", ReplanMethod)
def test_who_leaves_gets_no_part_however_failures_are_planned_for(recovery: ReplanMethod) -> None:
    """Else the plan would be changed for the leave again and again."""
    asked = replace(REQUEST, planner="pp")
    home = household(1.0, 1.0, 1.0)
    present = plan_cluster(asked, home)
    leaving = replace(home, leaving=frozenset({"device-1"}))
    replicas = place_replicas(present, chain=False)
    plan = replan_cluster(asked, leaving, present, replicas, recovery)
    used = {device.name for stage in plan.stages for device in stage.devices}
    assert used == {"device-0", "device-2"}


UNEQUAL = (1.0, 1.0, 20.0, 3.0)
"""Slowdowns of a household from which a fast plan would leave the third device out."""


def without(home: MeasuredCluster, gone: str) -> MeasuredCluster:
    others = [c for c in home.candidates if c.name != gone]
    links = {pair: link for pair, link in home.links.items() if gone not in pair}
    return replace(home, candidates=others, links=links)


def changed(
    planner: str, gone: str, home: MeasuredCluster, recovery: ReplanMethod = ReplanMethod.LIGHT
) -> tuple[Plan, Plan]:
    """A job's first plan, and the one after that device is gone from `home`."""
    asked = replace(REQUEST, planner=planner)
    present, less = plan_cluster(asked, household(*UNEQUAL)), without(home, gone)
    replicas = place_replicas(present).without({gone})
    return present, replan_cluster(asked, less, present, replicas, recovery, 60.0)


@pytest.mark.parametrize("gone", ["device-1", "device-3"])
@pytest.mark.parametrize("planner", ["dp", "ftpipehd", "hybrid", "pipedream", "pp"])
def test_a_planner_asked_for_by_name_leaves_no_device_out_after_a_failure(
    planner: str, gone: str
) -> None:
    present, plan = changed(planner, gone, household(*UNEQUAL))
    assert "device-2" in present.device_names  # however slow
    assert plan.device_names == present.device_names - {gone}


@pytest.mark.parametrize("planner", ["dp", "ftpipehd", "hybrid", "pipedream", "pp"])
def test_nor_while_all_goes_well_or_somebody_leaves(planner: str) -> None:
    asked, home = replace(REQUEST, planner=planner), household(*UNEQUAL)
    present = plan_cluster(asked, home)
    replicas = place_replicas(present)
    better = replan_cluster(asked, home, present, replicas, ReplanMethod.LIGHT)
    assert better.device_names == present.device_names
    leaving = replace(home, leaving=frozenset({"device-1"}))
    plan = replan_cluster(asked, leaving, present, replicas, ReplanMethod.LIGHT, 60.0)
    assert plan.device_names == present.device_names - {"device-1"}


@pytest.mark.parametrize(("planner", "gone"), [("dp", "device-3"), ("single", "device-1")])
def test_who_asked_for_whole_models_gets_them_after_a_failure_too(planner: str, gone: str) -> None:
    present, plan = changed(planner, gone, household(*UNEQUAL))
    asked = replace(REQUEST, planner=planner, micro_batch=present.micro_batch)
    assert plan == plan_cluster(asked, without(household(*UNEQUAL), gone))


@pytest.mark.parametrize("planner", ["ftpipehd", "pp"])
def test_stages_of_one_device_each_stay_so(planner: str) -> None:
    _, plan = changed(planner, "device-1", household(*UNEQUAL))
    assert [len(stage.devices) for stage in plan.stages] == [1, 1, 1]


def test_where_its_own_planner_has_no_plan_any_more_the_job_goes_on_with_one_close_to_it() -> None:
    home = household(*UNEQUAL)
    short = replace(home.candidates[2], memory=MemoryBudgets(0))
    home = replace(home, candidates=[*home.candidates[:2], short, home.candidates[3]])
    _, plan = changed("dp", "device-3", home)
    assert plan.device_names == {"device-0", "device-1"}


def test_everyone_waits_for_a_plan_so_it_is_searched_shortly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts = []

    def noted(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        efforts.append(request.effort)
        return make_plan(profile, cluster, replace(request, effort=0.01))

    monkeypatch.setattr(household_plan, "make_plan", noted)
    plan_cluster(replace(REQUEST, planner="auto"), household(*[1.0] * 6))
    assert set(efforts) == {PLANNING_EFFORT}


def open_mode(**changes: object) -> JobPlanRequest:
    """A straight pipeline of few micro-batches, in whichever mode."""
    settings: dict[str, object] = {"planner": "pp", "batch_size": 8, "micro_batch": 4, **changes}
    how = AsyncOptions()
    return replace(REQUEST, asynchrony=how, rounds=SharingLimits(), **settings)  # type: ignore[arg-type]


def test_where_waiting_dominates_an_open_mode_becomes_asynchronous() -> None:
    request, home = open_mode(), household(1.0, 1.0, 1.0)
    plan = plan_cluster(request, home)
    assert plan.mode is PlanMode.ASYNC
    assert "async is 1.28 times faster" in plan.mode_reason
    settled = request.settled(asynchronous=True)
    assert replace(plan, mode_reason="") == plan_cluster(settled, home)
    assert JobPlanRequest.from_bytes(request.to_bytes()) == request


def test_one_device_gains_nothing_by_not_waiting_for_itself() -> None:
    request, home = open_mode(planner="single", micro_batch=8), household(1.0)
    plan = plan_cluster(request, home)
    assert plan.mode is PlanMode.SYNC
    assert plan.mode_reason
    assert replace(plan, mode_reason="") == plan_cluster(request.settled(asynchronous=False), home)


def test_a_planner_that_shares_stages_settles_an_open_mode_where_only_rounds_can() -> None:
    unshared = SharingLimits(unshared="it has running statistics")
    plan = plan_cluster(open_mode(planner="dp", sharing=unshared), household(1.0, 1.0))
    assert plan.mode is PlanMode.SYNC
    assert "it has running statistics" in plan.mode_reason
