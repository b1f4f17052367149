"""A private job after a death: the first and the last stage stay with the data."""

from __future__ import annotations

import asyncio

import pytest
import torch

from p2ptrain.observe.events import Event, PlanEvent, Step
from p2ptrain.training.job import SGD, Job
from p2ptrain.training.options import TrainOptions
from tests.integration.training.household import devices, undisturbed
from tests.integration.training.test_job_life import make_job

STEPS = 8


def _job() -> Job:
    return make_job(optimizer=SGD(lr=0.05, momentum=0.9), epochs=4)


@pytest.mark.parametrize("name", ["b", "c"])
async def test_data_stays_at_home_and_the_curve_is_the_same(name: str) -> None:
    options = TrainOptions(wait_for=3, planner="pp", steps=STEPS, private=True)
    losses, weights = await undisturbed(_job(), options)
    job = _job()
    async with devices(3) as household:
        killing: list[asyncio.Task[None]] = []

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 4:
                killing.append(asyncio.create_task(household.mesh.kill(name)))

        await household.holder_run(job, options, listen).run()
        await asyncio.gather(*killing)
        assert household.losses == losses
        plans = [event for event in household.events if isinstance(event, PlanEvent)]
        assert [plan.reason for plan in plans] == ["start", "failure"]
        for plan in plans:
            ends = (plan.stages[0], plan.stages[-1])
            assert [[d.name for d in stage.devices] for stage in ends] == [["a"], ["a"]]
        assert name not in {d.name for stage in plans[1].stages for d in stage.devices}
    for key, tensor in weights.items():
        assert torch.equal(tensor, job.model.state_dict()[key]), key
