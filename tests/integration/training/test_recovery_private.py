"""A private job after a death: the first and the last stage stay with the data."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from p2ptrain.events import Plan
from tests.integration.training.household import devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    on_step,
    one_stage_each,
    undisturbed,
)

STEPS = 8


@pytest.mark.parametrize("name", ["b", "c"])
async def test_data_stays_at_home_and_the_curve_is_the_same(name: str) -> None:
    options = replace(one_stage_each(3, STEPS), private=True)
    wanted, job = undisturbed(momentum_job(), STEPS), momentum_job()
    async with devices(3) as household:
        killing: list[asyncio.Task[None]] = []

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill(name)))

        await household.holder_run(job, options, on_step(household, 4, kill)).run()
        await asyncio.gather(*killing)
        assert_undisturbed(household, job, wanted)
        plans = [event for event in household.events if isinstance(event, Plan)]
        assert [plan.reason for plan in plans] == ["start", "failure"]
        for plan in plans:
            ends = (plan.stages[0], plan.stages[-1])
            assert [[d.name for d in stage.devices] for stage in ends] == [["a"], ["a"]]
        assert name not in {d.name for stage in plans[1].stages for d in stage.devices}
