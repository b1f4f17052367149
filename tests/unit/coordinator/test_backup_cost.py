"""A plan's copies: peers by what memory the plan leaves, what they cost, and words about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.coordinator.backup_cost import (
    COPIES_A_MESSAGE_BYTE,
    COPIES_AN_UPDATE_BYTE,
    DIGESTS_AN_UPDATE_BYTE,
    MESSAGES_A_COPY,
    MESSAGES_A_READ,
    PlanBackups,
    interface_bytes,
    plan_backups,
)
from p2ptrain.coordinator.measured_cluster import MeasuredDevice, to_profile
from p2ptrain.plan.types.cluster import REFERENCE, ClusterLink
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.placement import PlacedStage
from tests.unit.coordinator.test_memory_model import measured, request

STATE = 2  # bytes of state a byte of parameters: SGD with momentum
UNITS = ((1000, 50, 10), (600, 30, 10), (400, 20, 10))
PEAK = 10_000
STAGES = (PlacedStage(0, 1, ("ix",)), PlacedStage(1, 2, ("iy",)), PlacedStage(2, 3, ("iz",)))
RATE = 1e6


def plan() -> Plan:
    return Plan.from_json(
        {
            "format": "p2ptrain.plan/1",
            "planner": "pp",
            "micro_batch": 4,
            "micro_batches": 4,
            "stages": [
                {"units": [p, p + 1], "devices": [{"name": name, "share": 4}], "warmup": 3 - p}
                for p, name in enumerate("xyz")
            ],
            "predicted": {
                "round_seconds": 2.0,
                "samples_per_s": 8.0,
                "peak_bytes": dict.fromkeys("xyz", PEAK),
            },
            "left_out": [],
        },
        "plan",
        batch_size=16,
    )


def found(*, replicas: bool = True, **memory_bytes: int) -> PlanBackups:
    """With the memory that x, y and z offer; without a word as much as anyone could want."""
    candidates = {
        f"i{name}": MeasuredDevice(
            f"i{name}", name, measured(*UNITS), MemoryBudgets(memory_bytes.get(name, 1 << 30))
        )
        for name in "xyz"
    }
    links = {(one, other): ClusterLink(RATE, 0.0) for one in "xyz" for other in "xyz"}
    asked = replace(request(), replicas=replicas)
    return plan_backups(asked, plan(), STAGES, candidates, links, "ix")


def test_neighbours_keep_and_the_cost_is_that_of_the_device_with_most_of_it() -> None:
    safe = found()
    assert [stage.copies_to for stage in safe.stages] == ["iy", "iz", "iy"]
    assert safe.warnings == ()
    own, for_others = (1000, 600, 400), (0, 1400, 600)
    taken = [2 * STATE * (mine + its) for mine, its in zip(own, for_others, strict=True)]
    assert [safe.taken_bytes[device] for device in ("ix", "iy", "iz")] == taken
    assert safe.cost is not None
    assert safe.cost.round_seconds == 2.0
    # y copies and sends 600 bytes of parameters, and keeps 1000 and 400 of others
    update, byte = REFERENCE.update_byte_seconds, REFERENCE.byte_seconds
    copied = STATE * 600 * COPIES_AN_UPDATE_BYTE * update
    passed = (
        STATE
        * (600 + 1000 + 400)
        * (DIGESTS_AN_UPDATE_BYTE * update + COPIES_A_MESSAGE_BYTE * byte)
    )
    messages = 3 * (MESSAGES_A_COPY + MESSAGES_A_READ) * REFERENCE.message_seconds
    assert safe.cost.cpu_seconds == pytest.approx(copied + passed + messages)
    ways = [(t.seconds, t.busy_seconds) for t in safe.cost.transfers]
    # y is at one end of each: at both borders of its stage a round's 16 samples pass
    busy = 16 * (50 + 30) / RATE
    assert ways == [pytest.approx((STATE * own / RATE, busy)) for own in (1000, 600, 400)]


def test_without_keepers_a_checkpoint_is_read_from_one_copy_of_each_stage() -> None:
    """A group's is the holder's, or the first device's."""
    stages = (
        PlacedStage(0, 1, ("iy", "ix")),
        PlacedStage(1, 2, ("iz", "iy")),
        PlacedStage(2, 3, ("ix",)),
    )
    candidates = {
        f"i{n}": MeasuredDevice(f"i{n}", n, measured(*UNITS), MemoryBudgets(PEAK)) for n in "xyz"
    }
    links = {(one, other): ClusterLink(RATE, 0.0) for one in "xyz" for other in "xyz"}
    for checkpoints, taken in ((True, {"ix": 1000 + 400, "iz": 600}), (False, {})):
        for replicas in (True, False):
            asked = replace(request(), replicas=replicas, checkpoints=checkpoints)
            safe = plan_backups(asked, plan(), stages, candidates, links, "ix")
            assert safe.cost is None
            assert safe.taken_bytes == {name: STATE * size for name, size in taken.items()}


def test_of_a_model_that_is_wholly_on_another_device_the_holder_takes_copies() -> None:
    one = [{"units": [0, 3], "devices": [{"name": "y", "share": 4}], "warmup": 1}]
    whole = Plan.from_json({**plan().to_json(), "stages": one}, "plan", batch_size=16)
    candidates = {
        f"i{n}": MeasuredDevice(f"i{n}", n, measured(*UNITS), MemoryBudgets(1 << 30)) for n in "xy"
    }
    links = {("x", "y"): ClusterLink(RATE, 0.0), ("y", "x"): ClusterLink(RATE, 0.0)}
    for holder, is_copied in (("ix", True), ("iy", False)):
        stages = (PlacedStage(0, 3, ("iy",)),)
        safe = plan_backups(request(), whole, stages, candidates, links, holder)
        assert safe.stages == stages, "it has no backup peer: the holder reads what is kept there"
        assert (safe.cost is not None) is is_copied
        versions = 2 * STATE * (1000 + 600 + 400)
        assert safe.taken_bytes == ({"ix": versions, "iy": versions} if is_copied else {})


def test_sums_and_divided_samples_take_a_keeper_s_interface() -> None:
    stages = (PlacedStage(0, 1, ("ix", "iy")), PlacedStage(1, 2, ("iz",)))
    carried = interface_bytes(stages, to_profile(measured(*UNITS), request()), 16)
    summed = 2 * 1 * 1000 / 2
    assert carried == pytest.approx(
        {"ix": summed + 16 * 50 / 2, "iy": summed + 16 * 50 / 2, "iz": 16 * (50 + 30)}
    )


def test_what_the_plan_takes_is_not_there_for_copies() -> None:
    slots = 2 * STATE
    safe = found(y=PEAK + slots * (600 + 400) - 1, z=PEAK + slots * (400 + 1000 + 600))
    assert [stage.copies_to for stage in safe.stages] == ["iz", "iz", "ix"]


def test_a_stage_nobody_has_room_for_is_reported() -> None:
    slots = 2 * STATE
    safe = found(x=PEAK + slots * 1000, y=PEAK + slots * 600, z=PEAK + slots * (400 + 600))
    assert [stage.copies_to for stage in safe.stages] == [None, "iz", None]
    assert safe.warnings == (
        "part 0 on x has no copy, for lack of memory: if that device fails, training goes "
        "back to the last checkpoint, or ends",
        "part 2 on z has no copy, for lack of memory: if that device fails, training goes "
        "back to the last checkpoint, or ends",
    )


def test_without_room_for_its_own_copy_of_anyone_there_is_nothing_to_go_back_to() -> None:
    safe = found(z=PEAK)
    assert [stage.copies_to for stage in safe.stages] == [None, None, None]
    assert safe.cost is None
    assert safe.warnings[0] == (
        "part 0 on x has no copy, for lack of memory on z: if that device fails, training goes "
        "back to the last checkpoint, or ends"
    )


def test_a_job_may_want_no_copies() -> None:
    safe = found(replicas=False)
    assert safe == PlanBackups(STAGES, None)
