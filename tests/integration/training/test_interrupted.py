"""Who interrupts a job with `out` gets the weights of its last step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from p2ptrain import events
from p2ptrain.events import Step
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.household import devices
from tests.integration.training.jobs import make_job, on_step, undisturbed


@pytest.mark.parametrize("count", [1, 2])
async def test_an_interrupt_writes_the_weights_of_the_last_step(count: int, tmp_path: Path) -> None:
    out, job = tmp_path / "w.safetensors", make_job(epochs=10_000)
    async with devices(count) as household:
        reached = asyncio.Event()
        options = TrainOptions(wait_for=count, planner="pp", out=out)
        listener = on_step(household, 4, reached.set)
        run = asyncio.create_task(household.holder_run(job, options, listener).run())
        await reached.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        last = max(event.step for event in household.events if isinstance(event, Step))
        said = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert said[-1] == f"the weights of step {last} are in {out}"
    wanted = undisturbed(make_job(epochs=10_000), last).state_dict
    for name, tensor in load_file(out).items():
        assert torch.equal(tensor, wanted[name]), name
