"""The device with the data was started again: plans change in its job as they did before.

Its new process has measured nothing, and the plan in force stayed without a planner being asked.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.events import Event, Plan, Step
from p2ptrain.holder.planning.plan_step import PlanStep
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.messages.assignment import Assignment
from p2ptrain.recovery.snapshot_schedule import SnapshotCost
from p2ptrain.recovery.version import Version
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.jobs import assert_undisturbed, momentum_job, undisturbed
from tests.integration.training.made_up import SOON
from tests.integration.training.test_recovery_elastic import (
    LONG,
    PIPELINE,
    leave,
    slowed,
    units_of,
    used,
)
from tests.integration.training.test_recovery_holder import again, killed

__all__ = ["slowed"]


def reasons(household: Devices) -> list[str]:
    """Of all plans, those of the first process too."""
    return [event.reason for event in household.events if isinstance(event, Plan)]


async def _unknown(*_: object) -> dict[object, object]:
    return {}


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("knows_plan", [True, False])
async def test_who_leaves_hands_its_work_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, knows_plan: bool
) -> None:
    """Also where the holder's profile could not be had as it came back."""
    if not knows_plan:
        monkeypatch.setattr(PlanStep, "_reports_again", _unknown)
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=SOON) as household:
        process = await killed(household, tmp_path, 3)
        await household.until_waiting("b", "c")
        leaving: list[asyncio.Task[None]] = []

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 6:
                leaving.append(asyncio.create_task(leave(household, "b")))

        hold_rounds(monkeypatch, 10, lambda: household.plan.reason == "leave")
        await household.restart("a")
        await household.holder_run(job, PIPELINE, listen, process.left).run()
        await asyncio.gather(*leaving)
        assert_undisturbed(household, job, wanted)
        assert reasons(household) == ["start", "failure", "leave"]
        assert used(household) == {"a", "c"}


async def test_a_device_that_slows_down_gets_less_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowed: dict[str, float]
) -> None:
    options = replace(PIPELINE, steps=LONG)
    wanted, job = undisturbed(momentum_job(20), LONG), momentum_job(20)
    async with devices(3, settings=SOON) as household:
        process = await killed(household, tmp_path, 3, momentum_job(20), options)
        await household.until_waiting("b", "c")
        slowed[household.mesh["b"].self_id] = 4.0
        hold_rounds(monkeypatch, 35, lambda: household.plan.reason == "drift")
        await again(household, process, job, options)
        assert_undisturbed(household, job, wanted)
        assert reasons(household) == ["start", "failure", "drift"]
        _, before, after = [e for e in household.events if isinstance(e, Plan)]
        assert units_of(after, "b") < units_of(before, "b")


@pytest.mark.usefixtures("slowed")
async def test_copies_are_taken_to_cost_what_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they cost nothing, one would be made as soon as the one before is kept."""
    begin = SnapshotManager.begin
    costs: list[SnapshotCost | None] = []

    def begun(
        copies: SnapshotManager,
        assignment: Assignment,
        cost: SnapshotCost | None,
        stable: Version | None,
    ) -> None:
        costs.append(cost)
        begin(copies, assignment, cost, stable)

    monkeypatch.setattr(SnapshotManager, "begin", begun)
    async with devices(3, settings=SOON) as household:
        process = await killed(household, tmp_path, 3)
        await household.until_waiting("b", "c")
        await again(household, process, momentum_job(), PIPELINE)
    before, after = costs
    assert before is not None
    assert after is not None
    assert after.round_seconds == before.round_seconds
    assert len(after.transfers) == len(before.transfers) == 3
    assert after.cpu_seconds == pytest.approx(before.cpu_seconds, rel=0.5)
