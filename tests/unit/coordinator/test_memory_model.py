"""What a job takes beside its units, by numbers worked out by hand, and plans that leave room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.coordinator.measured_cluster import (
    MeasuredCluster,
    MeasuredDevice,
    planner_question,
    to_profile,
)
from p2ptrain.coordinator.memory_model import taken_beside_bytes, with_full_memory
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.errors import PlanError
from p2ptrain.messages.plan_request import JobPlanRequest, SharingLimits
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.process.memory_budget import PROCESS_BYTES
from p2ptrain.recovery.rebuild_plan import replay_log_bytes
from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.tiling.planning.profile_maps import copied_bytes
from tests.support.feature_maps import chain
from tests.support.tiling_examples import CONVOLUTION

MIB = 1 << 20


def request(batch_size: int = 16, micro_batch: int = 4, planner: str = "pp") -> JobPlanRequest:
    return JobPlanRequest(
        job="j",
        digest="d",
        model="m",
        input_bytes=7,
        target_bytes=1,
        optimizer_state_ratio=1.0,
        batch_size=batch_size,
        micro_batch=micro_batch,
        min_micro_batch=1,
        planner=planner,
        private_first=0,
        private_last=0,
        optimizer=SGD(),
        seed=0,
        clip=False,
        first_step=0,
        alone=False,
        sharing=SharingLimits(),
    )


def measured(*units: tuple[int, int, int]) -> dict[str, Any]:
    """A profile of units with (parameter, output, activation) bytes."""
    names = ("parameter_bytes", "output_bytes", "activation_bytes")
    seconds = {"forward": [0.01] * len(units), "backward": [0.02] * len(units)}
    return {
        "units": [
            {"name": f"u{i}", "flops": 1, **dict(zip(names, unit, strict=True))}
            for i, unit in enumerate(units)
        ],
        "times": {"1": seconds},
    }


def with_passing(profile: Profile, passing: Sequence[int]) -> Profile:
    """Whose units take so many bytes for a moment; () = none."""
    given = zip(profile.units, passing or [0] * len(profile.units), strict=True)
    units = tuple(replace(unit, passing_bytes=bytes_) for unit, bytes_ in given)
    return replace(profile, units=units)


def planned(
    *stages: dict[str, Any],
    passing: Sequence[int] = (),
    asked: JobPlanRequest | None = None,
    memory_bytes: Mapping[str, int] | None = None,
) -> Plan:
    """What the prediction adds to the planners' bytes for 4 micro-batches of 4 on devices x, y, z.

    Units have 1200, 600 and 24 bytes of parameters, hand on 50 and 30 bytes a sample and keep 100,
    60 and 20. x is the holder. Without `memory_bytes` nothing is made ahead.
    """
    names = [device["name"] for stage in stages for device in stage["devices"]]
    plan = _plan(stages, names)
    profile = to_profile(measured((1200, 50, 100), (600, 30, 60), (24, 0, 20)), request())
    profile = with_passing(profile, passing)
    memory = dict.fromkeys(names, 0) if memory_bytes is None else memory_bytes
    budgets = {name: MemoryBudgets(bytes_) for name, bytes_ in memory.items()}
    return with_full_memory(plan, profile, asked or request(), "x", budgets)


def _plan(stages: Sequence[dict[str, Any]], names: Sequence[str]) -> Plan:
    return Plan.from_json(
        {
            "format": "p2ptrain.plan/1",
            "planner": "pp",
            "micro_batch": 4,
            "micro_batches": 4,
            "stages": list(stages),
            "predicted": {
                "round_seconds": 1.0,
                "samples_per_s": 16.0,
                "peak_bytes": dict.fromkeys(names, 5000),
            },
            "left_out": [],
        }
    )


def extras(*stages: dict[str, Any], passing: Sequence[int] = ()) -> dict[str, int]:
    """By device what `planned` adds to the planners' 5000 bytes and those of a process."""
    peaks = planned(*stages, passing=passing).predicted.peak_bytes
    return {name: peak - 5000 - PROCESS_BYTES for name, peak in peaks.items()}


def test_a_pipeline_counts_what_waits_at_its_cut() -> None:
    first = {"units": [0, 2], "devices": [{"name": "x", "share": 4}], "warmup": 3}
    last = {"units": [2, 3], "devices": [{"name": "y", "share": 4}], "warmup": 1}
    wire = 3 * 4 * 30
    fed = 32 * (7 + 1)
    log = HOME.first_snapshot_rounds * 16 * 30
    assert extras(first, last) == {
        "x": wire + 1200 + (4 * 160 + 1800) // 3 + (12 - 4) * 160 // 12 + fed + log,
        "y": 4 * 30 + wire + 24 + 4 * 20 + (4 * 20 + 24) // 3 + log,
    }


def test_stages_go_ahead_where_there_is_room_for_what_was_before() -> None:
    """Parameters and a state as large; for a stage on all of its devices, or on none."""
    first = {"units": [0, 1], "devices": [{"name": "x", "share": 4}], "warmup": 3}
    devices = [{"name": "y", "share": 3}, {"name": "z", "share": 1}]
    last = {"units": [1, 3], "devices": devices, "warmup": 1}
    needed = planned(first, last).predicted.peak_bytes

    def ahead(room: Mapping[str, int], asked: JobPlanRequest | None = None) -> dict[str, int]:
        memory = {name: peak + room[name] for name, peak in needed.items()}
        found = planned(first, last, asked=asked, memory_bytes=memory)
        more = {name: peak - needed[name] for name, peak in found.predicted.peak_bytes.items()}
        told = {d.name for stage in found.stages if stage.goes_ahead for d in stage.devices}
        assert {name for name, peak in more.items() if peak} == told
        return more

    before = {"x": 2 * 1200, "y": 2 * 624, "z": 2 * 624}
    assert ahead(before) == before
    assert ahead({**before, "y": before["y"] - 1}) == {"x": before["x"], "y": 0, "z": 0}
    assert ahead({**before, "x": 0}) == {**before, "x": 0}
    assert ahead(before, replace(request(), clip=True)) == dict.fromkeys("xyz", 0)


def test_a_device_of_a_group_counts_its_own_pieces() -> None:
    first = {"units": [0, 2], "devices": [{"name": "x", "share": 4}], "warmup": 3}
    dealt = {
        "units": [2, 3],
        "devices": [{"name": "y", "share": 3}, {"name": "z", "share": 1}],
        "warmup": 2,
        "allocation": "micro_batches",
    }
    found = extras(first, dealt)
    log = HOME.first_snapshot_rounds * 4 * 30  # of one micro-batch
    held = (8 - 4) * 20 // 12
    more = 24 + 4 * 20
    assert found["y"] == 8 * 30 + 3 * 4 * 30 + more + (4 * 20 + 24) // 3 + held + 3 * log
    alone = "one gradient: nothing to add to"
    assert found["z"] == 4 * 30 + 3 * 4 * 30 + 4 * 20 + (4 * 20 + 24) // 3 + log, alone

    divided = {**dealt, "devices": [{"name": "y", "share": 3}, {"name": "z", "share": 1}]}
    del divided["allocation"]
    found = extras(first, divided)
    assert found["z"] == 2 * 30 + 3 * 30 + 24 + 20 + (20 + 24) // 3 + 20 // 12 + log


def test_a_backward_takes_gradients_as_large_as_what_a_unit_keeps() -> None:
    """Those behind it have let go of what they kept by then: they count where they kept less."""
    needed = {kept: _needed(kept) for kept in ((100, 100, 800), (800, 100, 100), (0, 500, 500))}
    passing = {kept: bytes_ - min(needed.values()) for kept, bytes_ in needed.items()}
    assert passing == {
        (100, 100, 800): 4 * (800 - 500),
        (800, 100, 100): 4 * (600 - 500),
        (0, 500, 500): 0,
    }


def test_what_a_unit_takes_for_a_moment_counts_where_it_is_more_than_what_it_keeps() -> None:
    """T5's scores of all words, of which the loss reads one position: made, and never kept."""
    none, scores = _needed((100, 10)), _needed((100, 10), passing=(0, 700))
    assert scores - none == 4 * (700 - (100 - 10))
    assert _needed((100, 10), passing=(100, 10)) == none
    first = {"units": [0, 2], "devices": [{"name": "x", "share": 4}], "warmup": 3}
    last = {"units": [2, 3], "devices": [{"name": "y", "share": 4}], "warmup": 1}
    more = {
        name: bytes_ - extras(first, last)[name]
        for name, bytes_ in extras(first, last, passing=(0, 300, 0)).items()
    }
    assert more == {"x": 4 * (300 - 60), "y": 0}, "gradients that arrive are counted on the wire"


def _needed(kept: Sequence[int], passing: Sequence[int] = ()) -> int:
    """By a device alone with units that keep so much."""
    stage = {"units": [0, len(kept)], "devices": [{"name": "x", "share": 4}], "warmup": 1}
    plan = _plan([stage], ["x"])
    units = measured(*[(0, 0, size) for size in kept])
    profile = with_passing(to_profile(units, request()), passing)
    memory = {"x": MemoryBudgets()}
    return with_full_memory(plan, profile, request(), "x", memory).predicted.peak_bytes["x"]


def test_what_measuring_has_taken_already_is_not_taken_again() -> None:
    assert taken_beside_bytes(PROCESS_BYTES // 2) == 0
    assert taken_beside_bytes(PROCESS_BYTES + 7) == 7


def household(memory_bytes: int) -> MeasuredCluster:
    units = measured(*[(MIB, MIB // 4, MIB)] * 7, (MIB, 0, MIB))
    return MeasuredCluster((MeasuredDevice("1", "x", units, MemoryBudgets(memory_bytes)),), {}, "x")


def test_plans_leave_room_for_all_that_they_take() -> None:
    roomy = plan_cluster(request(64, 0, "single"), household(4 << 30))
    needed = roomy.predicted.peak_bytes["x"]
    tight = plan_cluster(request(64, 0, "single"), household(needed - MIB))
    assert tight.micro_batch < roomy.micro_batch
    assert tight.predicted.peak_bytes["x"] <= needed - MIB


def test_a_frozen_body_with_adapters_takes_what_was_measured_of_it() -> None:
    """Ten layers, 1536 wide, on two devices: 104 to 106 MiB (docs/results/memory.md)."""
    adapters = 2 * 8 * 1536 * 4
    units = measured(*[(1536 * 1537 * 4 + adapters, 1536 * 4, 1544 * 4)] * 10, (61_480, 0, 44))
    for unit in units["units"][:10]:
        unit["trainable_bytes"] = adapters
    names, memory = ("x", "y"), MemoryBudgets(300 * MIB)
    devices = tuple(MeasuredDevice(name, name, units, memory) for name in names)
    links = {("x", "y"): ClusterLink(1e8, 1e-4), ("y", "x"): ClusterLink(1e8, 1e-4)}
    asked = replace(request(32, 8, "dp"), optimizer_state_ratio=2.0)
    plan = plan_cluster(asked, MeasuredCluster(devices, links, "x"))
    assert plan.predicted.peak_bytes["y"] / MIB == pytest.approx(105, rel=0.15)


def test_no_plan_is_made_where_only_the_units_would_fit() -> None:
    units_bytes = 8 * 3 * MIB + 4 * 8 * MIB
    with pytest.raises(PlanError, match="missing"):
        plan_cluster(request(64, 4, "single"), household(PROCESS_BYTES + units_bytes + 2 * MIB))


def test_tiles_of_one_large_image_fit_where_the_image_does_not() -> None:
    """3 GiB of maps, of which six devices of 1 GiB have half a GiB each."""
    units = measured(*[(1024, 8 * MIB, 768 * MIB)] * 4, (1024, 0, 1024))
    names = [f"d{k}" for k in range(6)]
    links = {(a, b): ClusterLink(1e8, 1e-4) for a in names for b in names if a != b}
    household = MeasuredCluster(
        tuple(MeasuredDevice(name, name, units, MemoryBudgets(1024 * MIB)) for name in names),
        links,
        "d0",
    )
    maps = chain([CONVOLUTION] * 4, 96)
    plan = plan_cluster(replace(request(1, 1, "tiles"), maps=maps), household)
    first = plan.stages[0]
    assert first.tiling is not None
    assert len(first.devices) == 6
    sixth = 3072 * MIB / 6
    for device in first.devices:
        needed = plan.predicted.peak_bytes[device.name] - PROCESS_BYTES
        log = replay_log_bytes(1024 * MIB)
        most = 1.2 * 4 / 3 * sixth + log
        assert 4 / 3 * sixth <= needed <= most, "maps, halos, a third of holes, what was sent"


def test_tiles_count_what_they_put_together_with_halos() -> None:
    units = measured(*[(1024, MIB, 8 * MIB)] * 4, (1024, 0, 1024))
    names = ["d0", "d1"]
    links = {(a, b): ClusterLink(1e8, 1e-4) for a in names for b in names if a != b}
    household = MeasuredCluster(
        tuple(MeasuredDevice(n, n, units, MemoryBudgets(1024 * MIB)) for n in names), links, "d0"
    )
    asked = replace(request(4, 2, "tiles"), maps=chain([CONVOLUTION] * 4, 96))
    profile, _ = planner_question(asked, household)
    plan = plan_cluster(asked, household)
    first = plan.stages[0]
    assert first.tiling is not None
    assert asked.maps is not None
    copies = copied_bytes(asked.maps, first.tiling, [device.share for device in first.devices])
    bare = replace(plan, predicted=replace(plan.predicted, peak_bytes=dict.fromkeys(names, 0)))
    memory = dict.fromkeys(names, MemoryBudgets(1024 * MIB))
    peaks = [
        with_full_memory(
            bare, replace(profile, maps=maps), asked, "d0", memory
        ).predicted.peak_bytes
        for maps in (None, asked.maps)
    ]
    assert min(copies) > 0
    for device, copied in zip(first.devices, copies, strict=True):
        more = peaks[1][device.name] - peaks[0][device.name]
        assert more >= first.warmup * plan.micro_batch * copied


def test_batches_that_are_longer_than_measured_take_as_much_more() -> None:
    asked = replace(request(), stretch=2.5)
    profile = to_profile(measured((1200, 50, 100), (600, 30, 61)), asked)
    assert (profile.input_bytes, profile.target_bytes) == (18, 3)
    assert [unit.output_bytes for unit in profile.units] == [125, 75]
    assert [unit.activation_bytes for unit in profile.units] == [250, 153]
    assert [unit.parameter_bytes for unit in profile.units] == [1200, 600]
