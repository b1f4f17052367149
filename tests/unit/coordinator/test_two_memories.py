"""Devices whose accelerator has a memory of its own: what lies where, and plans for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.coordinator.backup_cost import plan_backups
from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    sharing_machines,
    to_profile,
)
from p2ptrain.coordinator.memory_model import with_full_memory
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.coordinator.plan_question import PlanQuestion, fit_plan
from p2ptrain.errors import PlanError, ProtocolError
from p2ptrain.net import cbor
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.memory_budget import PROCESS_BYTES
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.recovery.placement import PlacedStage
from tests.unit.coordinator.test_memory_model import MIB, measured, request

CARD = ComputeKind("cuda 9.0 card, torch 2", "card")

ROOMY = MemoryBudgets(4096 * MIB, 4096 * MIB)

BYTES = st.integers(0, 1 << 40)

BUDGETS = st.builds(MemoryBudgets, BYTES, st.none() | BYTES)


@given(BUDGETS, BUDGETS)
def test_what_is_needed_fits_where_each_memory_has_it(
    has: MemoryBudgets, needed: MemoryBudgets
) -> None:
    short = has.shortage(needed)
    if has.host_bytes is None:
        fits = needed.compute_bytes + (needed.host_bytes or 0) <= has.compute_bytes
    else:
        on_host = needed.host_bytes or 0
        fits = needed.compute_bytes <= has.compute_bytes and on_host <= has.host_bytes
    assert (short is None) == fits
    if short is not None:
        more = short.of(needed.in_memories_of(has)) - short.of(has)
        assert more > 0
        assert short.in_host <= has.has_two


@given(BUDGETS, BUDGETS, BYTES, st.booleans())
def test_less_is_less_of_one_memory(
    has: MemoryBudgets, limit: MemoryBudgets, most: int, in_host: bool
) -> None:
    short = MemoryShortage(has, in_host and has.has_two)
    less = short.lowered(has, most)
    assert short.of(less) == min(most, short.of(has))
    assert less.total_bytes - has.total_bytes == short.of(less) - short.of(has)
    least = has.at_most(limit)
    assert has.shortage(least) is None
    assert least.has_two == has.has_two
    if limit.has_two == has.has_two:
        assert limit.shortage(least) is None


@pytest.mark.parametrize("in_host", [False, True])
def test_a_device_that_ran_out_of_one_memory_offers_less_of_that(in_host: bool) -> None:
    """Whatever it believes to have."""
    device = MeasuredDevice("1", "y", {}, ROOMY, compute=CARD)
    less = device.with_less_memory(MemoryShortage(ROOMY, in_host)).memory
    same, smaller = ("compute_bytes", "host_bytes") if in_host else ("host_bytes", "compute_bytes")
    assert getattr(less, same) == getattr(ROOMY, same)
    assert PROCESS_BYTES < getattr(less, smaller) < getattr(ROOMY, smaller)
    found = replace(ROOMY, **{smaller: 7})
    assert device.with_less_memory(MemoryShortage(found, in_host)).memory == found


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[dict[str, Any]]]:
    """Units, and stages of them on x, y and z."""
    sizes = st.integers(0, 1 << 28)
    cuts = draw(st.sampled_from([(3,), (1, 3), (1, 2, 3)]))
    units = [(draw(sizes), draw(sizes), draw(sizes)) for _ in range(2)]
    units.append((draw(sizes), 0, draw(sizes)))
    names, stages = iter("xyz"), []
    for first, end in zip((0, *cuts), cuts, strict=False):
        devices = [{"name": next(names), "share": 4}]
        stages.append({"units": [first, end], "devices": devices, "warmup": 1})
    if len(cuts) == 2 and draw(st.booleans()):
        stages[-1]["devices"] = [{"name": "y", "share": 3}, {"name": "z", "share": 1}]
    return units, stages


@given(plans(), st.sampled_from([0, 1]))
def test_every_byte_lies_in_one_memory(
    made: tuple[list[tuple[int, int, int]], list[dict[str, Any]]], room: int
) -> None:
    """What an accelerator's plan has in both is a processor's; what passes through is known."""
    units, stages = made
    names = [device["name"] for stage in stages for device in stage["devices"]]
    plan, profile = _plan(stages, names), to_profile(measured(*units), request())
    huge = room << 60

    def needed(memory: MemoryBudgets) -> Mapping[str, MemoryBudgets]:
        full = with_full_memory(plan, profile, request(), "x", dict.fromkeys(names, memory))
        return {name: full.predicted.needed(name) for name in names}

    one, two = needed(MemoryBudgets(huge)), needed(MemoryBudgets(huge, huge))
    for stage in stages:
        first, end = stage["units"]
        state = profile.state(first, end)
        summed = state.summed_bytes if len(stage["devices"]) > 1 else 0
        for name in (device["name"] for device in stage["devices"]):
            assert not one[name].has_two
            beside = one[name].compute_bytes - two[name].compute_bytes
            passing = PROCESS_BYTES + state.version_bytes
            assert two[name].host_bytes == max(beside + summed, passing)
            crossing = (units[first - 1][1] if first else 0) + units[end - 1][1]
            samples = next(d["share"] for d in stage["devices"] if d["name"] == name)
            wire = 3 * samples * crossing
            fed = 32 * (7 + 1) if name == "x" else 0
            assert beside >= PROCESS_BYTES + wire + fed
            log = beside - PROCESS_BYTES - wire - fed
            assert log <= 8 * 16 * crossing * samples / 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("unified", [False, True])
def test_a_group_of_several_kinds_is_updated_in_the_host_s_memory(
    ahead: bool, unified: bool
) -> None:
    """Of 6 MiB of weights with as much state; a processor takes what it takes in any group."""
    stages = [{"units": [0, 2], "devices": [], "warmup": 1}]
    stages[0]["devices"] = [{"name": "y", "share": 3}, {"name": "z", "share": 1}]
    plan = _plan(stages, ["y", "z"])
    peaks = replace(plan.predicted, peak_bytes={"y": 99 * MIB, "z": 99 * MIB})
    plan = replace(plan, predicted=peaks)
    profile = to_profile(measured((4 * MIB, 0, 0), (2 * MIB, 0, 0)), request())
    asked = replace(request(), clip=not ahead)
    card = MemoryBudgets(1 << 40, None if unified else 1 << 40)
    memory = {"y": MemoryBudgets(1 << 40), "z": card}

    def needed(kinds: Mapping[str, str]) -> Mapping[str, MemoryBudgets]:
        full = with_full_memory(plan, profile, asked, "y", memory, kinds)
        assert full.stages[0].goes_ahead is ahead
        return {name: full.predicted.needed(name) for name in "yz"}

    weights = 6 * MIB
    alike, mixed = needed({"y": CARD.kind, "z": CARD.kind}), needed({"y": "cpu", "z": CARD.kind})
    assert alike["y"] == mixed["y"]
    if unified:
        assert mixed["z"].compute_bytes == alike["z"].compute_bytes + weights
    else:
        before = 2 * weights if ahead else 0
        assert mixed["z"].compute_bytes == alike["z"].compute_bytes - weights - before
        summed = weights
        assert mixed["z"].of_host == PROCESS_BYTES + summed + 2 * weights + before


def _plan(stages: list[dict[str, Any]], names: list[str]) -> Plan:
    return Plan.from_json(
        {
            "format": "p2ptrain.plan/1",
            "planner": "pp",
            "micro_batch": 4,
            "micro_batches": 4,
            "stages": stages,
            "predicted": {
                "round_seconds": 1.0,
                "samples_per_s": 16.0,
                "peak_bytes": dict.fromkeys(names, 5000),
            },
            "left_out": [],
        }
    )


def household(memory: Mapping[str, MemoryBudgets]) -> MeasuredCluster:
    """The first one has the data; eight units of 8 MiB of parameters and as much state each."""
    units = measured(*[(8 * MIB, MIB // 64, MIB)] * 7, (8 * MIB, 0, MIB))
    candidates = [
        MeasuredDevice(name, name, units, one, compute=CARD if one.has_two else PROCESSOR)
        for name, one in memory.items()
    ]
    links = {(a, b): ClusterLink(1e9, 1e-4) for a in memory for b in memory if a != b}
    return MeasuredCluster(tuple(candidates), links, next(iter(memory)))


def _units(plan: Plan) -> dict[str, int]:
    return {d.name: stage.units[1] - stage.units[0] for stage in plan.stages for d in stage.devices}


def test_a_plan_fits_both_memories() -> None:
    """Equal cards would share the work; one that lacks either memory gets less of it."""
    asked = request(16, 4, "pp")
    equal = _units(plan_cluster(asked, household({"x": ROOMY, "y": ROOMY})))
    assert equal == {"x": 4, "y": 4}
    for small in (MemoryBudgets(100 * MIB, ROOMY.host_bytes), replace(ROOMY, host_bytes=60 * MIB)):
        home = household({"x": ROOMY, "y": small})
        plan = plan_cluster(asked, home)
        assert 0 < _units(plan)["y"] < 4
        assert small.shortage(plan.predicted.needed("y")) is None
        assert PlanQuestion(asked, home).answered(cbor.dumps(plan.to_json())) == plan


def test_a_card_counts_by_itself() -> None:
    """A host's 120 MiB would hold two of these layers, were all counted there."""
    needed = plan_cluster(request(16, 4, "single"), household({"x": ROOMY})).predicted.needed("x")
    assert needed.host_bytes is not None
    assert needed.compute_bytes > 200 * MIB
    assert needed.host_bytes < PROCESS_BYTES + 8 * 16 * MIB + MIB, "its state passes through"
    plan_cluster(request(16, 4, "single"), household({"x": needed}))


@pytest.mark.parametrize("planner", ["auto", "pp"])
def test_a_host_that_holds_nothing_is_left_out_and_named(planner: str) -> None:
    asked = request(16, 4, planner)
    home = household({"x": ROOMY, "y": replace(ROOMY, host_bytes=PROCESS_BYTES)})
    why = r"in the host's memory of y, beside its accelerator, which has 16.8 MB: .* missing"
    if planner == "pp":
        with pytest.raises(PlanError, match=why):
            plan_cluster(asked, home)
        return
    plan = plan_cluster(asked, replace(home, candidates=_slower(home, "x")))
    [out] = plan.left_out
    assert out.name == "y"
    assert "host's memory of y" in out.reason


def _slower(home: MeasuredCluster, name: str) -> list[MeasuredDevice]:
    """One takes ten times as long: without its memory the other would do all the work."""

    def slow(one: MeasuredDevice) -> MeasuredDevice:
        times = {
            size: {part: [10 * s for s in seconds] for part, seconds in by_part.items()}
            for size, by_part in one.measured["times"].items()
        }
        return replace(one, measured={**one.measured, "times": times})

    return [slow(one) if one.name == name else one for one in home.candidates]


def test_a_given_plan_that_either_memory_lacks_room_for_is_refused() -> None:
    asked = request(16, 4, "pp")
    plan = plan_cluster(asked, household({"x": ROOMY, "y": ROOMY}))
    fit_plan(plan, asked, household({"x": ROOMY, "y": ROOMY}))
    for small, where in (
        (MemoryBudgets(MIB, ROOMY.host_bytes), r"on the accelerator of y, which has 1.05 MB"),
        (replace(ROOMY, host_bytes=MIB), r"in the host's memory of y, .* which has 1.05 MB"),
    ):
        home = household({"x": ROOMY, "y": small})
        with pytest.raises(PlanError, match=f"{where}: .* missing. Free some"):
            fit_plan(plan, asked, home)
        with pytest.raises(ProtocolError, match="too little memory"):
            PlanQuestion(asked, home).answered(cbor.dumps(plan.to_json()))


def test_a_given_plan_may_fit_a_card_whose_host_makes_the_updates() -> None:
    """What the card lacks is less than the optimizer keeps for 64 MiB of weights."""
    asked = request(16, 4, "dp")
    plan = plan_cluster(asked, household({"x": ROOMY, "y": ROOMY}))
    before = 128 * MIB  # without which updates wait for their commit
    needed = plan.predicted.needed("y").compute_bytes - before
    small = replace(ROOMY, compute_bytes=needed - 32 * MIB)
    with pytest.raises(PlanError, match="on the accelerator of y"):
        fit_plan(plan, asked, household({"x": ROOMY, "y": small}))
    home = household({"x": MemoryBudgets(ROOMY.compute_bytes), "y": small})
    fitted = fit_plan(plan, asked, home).predicted.needed("y")
    assert fitted.compute_bytes == needed - 64 * MIB


def test_copies_go_where_the_host_has_memory() -> None:
    """Each backup peer is the next stage's device, unless its host has no room for it."""
    asked = request(16, 4, "pp")
    names = ("x", "y", "z")
    plan = plan_cluster(asked, household(dict.fromkeys(names, ROOMY)))
    stages = [PlacedStage(*s.units, tuple(d.name for d in s.devices)) for s in plan.stages]
    needed = plan.predicted.needed("y")
    assert needed.host_bytes is not None
    own_bytes = 2 * 3 * 16 * MIB  # two versions of three layers, of weights and momentum
    full = replace(needed, host_bytes=needed.host_bytes + own_bytes)
    for memory, backup_peer in (
        (ROOMY, "y"),
        (replace(full, compute_bytes=ROOMY.compute_bytes), "z"),
        (replace(full, host_bytes=ROOMY.host_bytes), "y"),
    ):
        home = household({"x": ROOMY, "y": memory, "z": ROOMY})
        candidates = {one.id: one for one in home.candidates}
        found = plan_backups(
            replace(asked, replicas=True), plan, stages, candidates, home.links, "x"
        )
        assert found.stages[0].copies_to == backup_peer


def test_members_of_one_machine_count_the_host_s_memory_once() -> None:
    home = household({"x": MemoryBudgets(900), "y": MemoryBudgets(700, 900), "z": ROOMY})
    desk = ("x", "y")
    candidates = [
        replace(c, compute=replace(c.compute, machine="desk" if c.name in desk else ""))
        for c in home.candidates
    ]
    shared = sharing_machines(candidates)
    assert {name: one.memory for name, one in shared.items()} == {
        "x": MemoryBudgets(450),
        "y": MemoryBudgets(700, 450),
        "z": ROOMY,
    }
    assert list(sharing_machines(candidates[1:]).values()) == candidates[1:], "it is alone there"


def test_memory_that_no_layer_can_have_is_said_with_its_own_figures() -> None:
    with pytest.raises(PlanError, match=r"x may use 1.05 MB of memory, and .* more than 25.2 MB"):
        plan_cluster(request(16, 4, "auto"), household({"x": MemoryBudgets(MIB)}))
