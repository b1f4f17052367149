"""What planners are asked for a job without a barrier, and which plans are taken."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    is_profiled,
    planner_question,
    with_times_of_holder,
)
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.coordinator.plan_expectations import correct_profiles, expected_seconds
from p2ptrain.errors import OptionError, PlanError, ProtocolError
from p2ptrain.job.asynchrony import AsyncOptions, FtpipehdOptions
from p2ptrain.messages.assign import assignment_of
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanMode
from p2ptrain.plan.types.weight_versions import Weights, depths_of
from p2ptrain.recovery.placement import PlacedStage, Placement
from p2ptrain.recovery.profile_corrections import ProfileCorrections
from p2ptrain.recovery.state_report import StateReport
from p2ptrain.recovery.version import Lineage, Version
from tests.unit.coordinator.test_memory_model import MIB, measured, request

STASHED = AsyncOptions()
VERTICAL = AsyncOptions(Weights.VERTICAL)
DOUBLE = AsyncOptions(Weights.DOUBLE)
UNSTASHED = AsyncOptions(Weights.UNSTASHED)
UNIT_BYTES = 8 * MIB
COUNT = 3
DEALT = Allocation.MICRO_BATCHES


def asked(how: AsyncOptions, planner: str = "pp", **changes: object) -> JobPlanRequest:
    return replace(request(16, 0, planner), asynchrony=how, **changes)  # type: ignore[arg-type]


def household(memory_bytes: int = 4 << 30) -> MeasuredCluster:
    """Three equal devices; equal units with large weights."""
    units = measured(*[(UNIT_BYTES, 1000, 1000)] * 6)
    names = [f"d{number}" for number in range(COUNT)]
    links = {pair: ClusterLink(1e9, 0.0001) for pair in permutations(names, 2)}
    candidates = [MeasuredDevice(name, name, units, MemoryBudgets(memory_bytes)) for name in names]
    return MeasuredCluster(tuple(candidates), links, "d0")


@pytest.mark.parametrize("planner", ["pp", "auto", "ftpipehd"])
def test_plans_are_as_deep_as_the_delays_say(planner: str) -> None:
    plan = plan_cluster(asked(STASHED, planner), household())
    assert plan.mode is PlanMode.ASYNC
    assert plan.micro_batch == 16
    devices = [len(stage.devices) for stage in plan.stages]
    assert tuple(stage.warmup for stage in plan.stages) == depths_of(devices)
    assert all(len(s.devices) == 1 or s.allocation is DEALT for s in plan.stages)
    assert expected_seconds(asked(STASHED, planner), household(), plan) == {}


def test_ftpipehds_settings_travel_and_are_checked() -> None:
    wished = FtpipehdOptions(3, 4, 5, 6)
    request = asked(STASHED, "ftpipehd", ftpipehd=wished)
    assert JobPlanRequest.from_bytes(request.to_bytes()) == request
    for wrong in ({"chain": 0}, {"whole": "2"}, {"more": 1}):
        with pytest.raises(ProtocolError):
            read_form(FtpipehdOptions, {**write_form(wished), **wrong}, "settings")
    with pytest.raises(OptionError, match="first repartition counts mini-batches"):
        FtpipehdOptions(0)


@given(st.integers(1, 9), st.integers(1, 30), st.sets(st.integers(0, 200), min_size=2))
def test_copies_are_made_as_soon_as_they_can_be_after_each_so_many(
    chain: int, whole: int, chances: set[int]
) -> None:
    """Between two multiples of the number one at most, and one wherever there was a chance."""
    wished, last, made = FtpipehdOptions(chain=chain, whole=whole), 0, []
    for step in sorted(chances):
        if wished.copies(last, step):
            made.append(step)
            last = step
    for number in (chain, whole):
        for first in range(number, 201, number):
            here = [step for step in chances if first <= step < first + number]
            assert not here or min(here) in made
    assert all(step >= min(chain, whole) for step in made)


def test_ftpipehd_begins_with_the_times_of_the_device_with_the_data() -> None:
    """Whatever others have measured, or nothing: C_i = 1; expected is what a mini-batch takes."""
    request = asked(STASHED, "ftpipehd", ftpipehd=FtpipehdOptions())
    around = household()
    known = {c.id: c if c.id == "d0" else replace(c, measured={}) for c in around.candidates}
    assert is_profiled(StateReport("d1", memory=MemoryBudgets(1)), request, "d0")
    assert not is_profiled(StateReport("d0", memory=MemoryBudgets(1)), request, "d0")
    assert not is_profiled(
        StateReport("d1", memory=MemoryBudgets(1)), asked(STASHED, "ftpipehd"), "d0"
    )
    alike = replace(around, candidates=list(with_times_of_holder("d0", known).values()))
    plan = plan_cluster(request, alike)
    assert plan == plan_cluster(request, around)
    expected = expected_seconds(request, alike, plan)
    assert sorted(expected) == [(0, "d0"), (1, "d1"), (2, "d2")]
    assert len({round(due.wall, 9) for due in expected.values()}) == 1, "equal parts, equal devices"
    slow = correct_profiles(
        alike.candidates[2].measured, ProfileCorrections(devices={"d2": 4.0}), "d2"
    )
    slower = replace(alike, candidates=[*alike.candidates[:2], replace(known["d2"], measured=slow)])
    more = expected_seconds(request, slower, plan)
    assert more[2, "d2"].wall == pytest.approx(4 * expected[2, "d2"].wall)
    assert more[0, "d0"] == expected[0, "d0"]


def test_equal_devices_compute_nearly_all_the_time() -> None:
    """By the simulated timeline, once the pipeline is full."""
    profile, cluster = planner_question(asked(STASHED), household())
    plan = plan_cluster(asked(STASHED), household())
    busy = simulate(plan, profile, cluster).busy_share
    assert len(busy) == COUNT
    assert min(busy.values()) >= 0.95


def test_memory_counts_the_versions_that_stages_keep() -> None:
    """Beside one version of 2 units a stage: 2, 1, 0 more, or as many as the kind needs."""
    base = plan_cluster(asked(UNSTASHED), household()).predicted.peak_bytes
    more = {STASHED: (2, 1, 0), VERTICAL: (2, 2, 2)}
    for how, versions in more.items():
        peaks = plan_cluster(asked(how), household()).predicted.peak_bytes
        found = [(peaks[name] - base[name]) / (2 * UNIT_BYTES) for name in ("d0", "d1", "d2")]
        assert found == pytest.approx(versions)


def test_two_versions_take_less_than_stashing_and_more_pieces() -> None:
    stashed = plan_cluster(asked(STASHED), household()).predicted.peak_bytes
    plan = plan_cluster(asked(DOUBLE), household())
    assert plan.micro_batch == 2, "eight pieces, where nobody fixed their size"
    assert plan.predicted.peak_bytes["d0"] < stashed["d0"]
    assert plan_cluster(asked(DOUBLE, micro_batch=4), household()).micro_batch == 4
    with pytest.raises(
        PlanError,
        match="each of the 3 parts needs its own micro-batch, and there are 2: use a smaller",
    ):
        plan_cluster(asked(DOUBLE, micro_batch=8), household())


def test_a_shallower_pipeline_is_no_answer_to_little_memory() -> None:
    """It would have other delays than the job asked for."""
    needed = plan_cluster(asked(STASHED), household()).predicted.peak_bytes["d0"]
    with pytest.raises(PlanError, match="both again for each further batch"):
        plan_cluster(asked(STASHED), household(needed - 2 * UNIT_BYTES))


def assignment(plan: Plan, how: AsyncOptions, **changes: object) -> Assignment:
    stages = tuple(PlacedStage(*s.units, tuple(d.name for d in s.devices)) for s in plan.stages)
    placed = Placement(1, "d0", Version(0, 0), Lineage(), stages)
    return replace(assignment_of(asked(how), plan, placed), **changes)  # type: ignore[arg-type]


def test_an_assignment_says_how_and_travels() -> None:
    plan = plan_cluster(asked(VERTICAL), household())
    sent = assignment(plan, VERTICAL)
    assert sent.asynchrony == VERTICAL
    assert Assignment.from_bytes(sent.to_bytes()) == sent
    assert JobPlanRequest.from_bytes(asked(VERTICAL).to_bytes()) == asked(VERTICAL)


def test_an_assignment_that_cannot_keep_to_its_delays_is_refused() -> None:
    plan = plan_cluster(asked(STASHED), household())
    good = assignment(plan, STASHED)
    shallow = tuple(replace(place, warmup=1) for place in good.stages)
    for bad, words in (
        (replace(good, stages=shallow), r"depths of \[3, 2, 1\]"),
        (replace(good, clip=True), "wait for no other"),
        (replace(good, asynchrony=DOUBLE), "need 3 micro-batches at least"),
    ):
        with pytest.raises(ProtocolError, match=words):
            Assignment.from_bytes(bad.to_bytes())
