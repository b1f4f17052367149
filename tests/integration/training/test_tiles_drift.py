"""A device with tiles slows down: it gets smaller ones, and nothing in the result shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from torch import nn

from p2ptrain import events
from p2ptrain.coordinator.measured_cluster import MeasuredCluster
from p2ptrain.coordinator.plan_expectations import expected_seconds
from p2ptrain.events import Event, Step
from p2ptrain.holder.planning import plan_step
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.plan_request import JobPlanRequest
from p2ptrain.messages.round_orders import RoundReport
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.profile_corrections import ExpectedSeconds
from p2ptrain.runtime.stage_sender import LiveStageSender
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.made_up import SOON, make_up_profiles
from tests.integration.training.test_tiles import TOLERANCE, check_replicas, job
from tests.support.curves import by_plain_torch, difference
from tests.support.memory_household import memory_id
from tests.support.reference import Outcome

STEPS, SLOWS_DOWN = 32, 15


class Rounds:
    """Rounds that take what the plan in force expects, times a factor by device.

    What a device has slowed down by is part of what the next plan expects.

    Attributes:
        factors: by device id.
        areas: by step, the part of the maps that each device has.
    """

    def __init__(self, household: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factors: dict[str, float] = {}
        self.areas: dict[int, Mapping[str, float]] = {}
        self._household = household
        self.expected: Mapping[Seat, ExpectedSeconds] = {}
        rounds, report = self, LiveStageSender.report

        def expected(
            request: JobPlanRequest, measured: MeasuredCluster, plan: Plan
        ) -> dict[Seat, ExpectedSeconds]:
            found = expected_seconds(request, measured, plan)
            rounds.expected = found
            rounds.factors.clear()
            return found

        async def reported(links: LiveStageSender, said: RoundReport) -> None:
            me = links.shell.mesh.self_id
            due, factor = rounds.expected[links.index, me], rounds.factors.get(me, 1.0)
            await report(links, replace(said, busy_seconds=due.wall * factor, cpu_seconds=due.cpu))

        make_up_profiles(monkeypatch)
        monkeypatch.setattr(plan_step, "expected_seconds", expected)
        monkeypatch.setattr(LiveStageSender, "report", reported)

    def note(self, step: int) -> None:
        """Who has how much of the maps now."""
        hosted = self._household.members["a"].service.slot.hosted
        assert hosted is not None
        first = hosted.assignment.stages[0]
        assert first.tiling is not None
        areas = first.tiling.areas(first.shares)
        self.areas[step] = dict(zip(first.devices, areas, strict=True))


def reasons(household: Devices) -> list[str]:
    """Of the plans so far."""
    return [event.reason for event in household.events if isinstance(event, events.Plan)]


@pytest.mark.parametrize("slow", ["b", None])
async def test_a_slow_device_gets_smaller_tiles(
    monkeypatch: pytest.MonkeyPatch, slow: str | None
) -> None:
    what = job(micro_batch=8)
    async with devices(3, settings=SOON) as household:
        rounds = Rounds(household, monkeypatch)

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step):
                rounds.note(event.step)
                if event.step == SLOWS_DOWN and slow is not None:
                    rounds.factors[memory_id(slow)] = 4.0
                if event.step == STEPS:
                    check_replicas(household)

        if slow is not None:
            hold_rounds(monkeypatch, STEPS - 5, lambda: "drift" in reasons(household))
        options = TrainOptions(wait_for=3, planner="tiles", steps=STEPS)
        await household.holder_run(what, options, listen).run()
    assert reasons(household) == (["start"] if slow is None else ["start", "drift"])
    if slow is not None:
        before, after = (rounds.areas[step][memory_id(slow)] for step in (SLOWS_DOWN, STEPS))
        assert after < before / 2
    assert isinstance(what.model, nn.Module)
    state = {name: tensor.detach().clone() for name, tensor in what.model.state_dict().items()}
    ours = Outcome(list(household.losses), state)
    found = difference(ours, by_plain_torch(job(micro_batch=8), STEPS))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE
