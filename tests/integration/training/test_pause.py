"""A person pauses a job: no update begins, a death meanwhile costs nothing, the curve is exact."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.events import Event, Failure, Step
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    STEPS,
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    steps_of,
    undisturbed,
)

UNDER_WAY = 2
"""Updates that were ordered before the pause at most."""


class _Paused:
    """A job that is paused as it reports step 4."""

    def __init__(self, household: Devices, options: TrainOptions) -> None:
        self.is_paused = asyncio.Event()
        self.has_failed = asyncio.Event()
        self.run = household.holder_run(momentum_job(), options, self._listen)
        self._household = household

    def _listen(self, event: Event) -> None:
        self._household.events.append(event)
        if isinstance(event, Step) and event.step == 4:
            self.run.pause.begin()
            self.is_paused.set()
        elif isinstance(event, Failure):
            self.has_failed.set()


@pytest.mark.parametrize("dies", [None, "b"])
async def test_a_paused_job_goes_on_as_if_nothing_had_been(dies: str | None) -> None:
    wanted = undisturbed(momentum_job())
    async with devices(3) as household:
        job = _Paused(household, one_stage_each(3))
        running = asyncio.create_task(job.run.run())
        await job.is_paused.wait()
        if dies is not None:
            await household.mesh.kill(dies)
            await job.has_failed.wait()
        await asyncio.sleep(0.3)  # an update takes some ms
        assert not running.done()
        assert steps_of(household)[-1] <= 4 + UNDER_WAY
        assert job.run.pause.end()
        await running
        assert_undisturbed(household, job.run.job, wanted)


async def test_a_paused_job_without_barriers_loses_no_mini_batch() -> None:
    async with devices(2) as household:
        job = _Paused(household, TrainOptions(wait_for=2, planner="pp", mode="async"))
        running = asyncio.create_task(job.run.run())
        await job.is_paused.wait()
        await asyncio.sleep(0.3)
        assert not running.done()
        job.run.pause.end()
        await running
        assert steps_of(household) == list(range(1, STEPS + 1))


async def test_a_paused_job_that_is_stopped_still_writes_its_weights(tmp_path: Path) -> None:
    async with devices(2) as household:
        out = tmp_path / "weights.safetensors"
        job = _Paused(household, replace(one_stage_each(2), out=out))
        running = asyncio.create_task(job.run.run())
        await job.is_paused.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert out.exists()
