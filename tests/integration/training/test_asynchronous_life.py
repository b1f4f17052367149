"""What can happen to an asynchronous job: it is always some cut that training continues from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from p2ptrain.errors import OptionError, PlanError, TrainingError
from p2ptrain.events import Event, Plan, Step, Warning
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import ReplanMethod, TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.state.checkpoint_files import load
from tests.integration.training.delayed import Generations, by_formula, cut_of, delayed_job, options
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import assert_same_weights, job_that_ends_in_nan
from tests.integration.training.test_recovery_elastic import leave
from tests.integration.training.test_recovery_holder import Process

STASHED = AsyncOptions()
STEPS = 24

Happening = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


async def course(
    household: Devices, job: Job, chosen: TrainOptions, step: int, happens: Happening
) -> Generations:
    """Train; something happens as people hear of `step`."""
    generations, tasks = Generations(household), []

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step) and event.step == step:
            tasks.append(asyncio.create_task(happens()))

    with generations.watched():
        await household.holder_run(job, chosen, listen).run()
    await asyncio.gather(*tasks)
    return generations


def reasons(household: Devices) -> list[str]:
    return [event.reason for event in household.events if isinstance(event, Plan)]


async def test_who_leaves_hands_its_work_over_and_nothing_is_computed_again() -> None:
    """The pipeline is emptied first: then all stages are at one version."""
    job = delayed_job()
    async with devices(3) as household:
        generations = await course(
            household, job, options(3, STASHED, STEPS), 8, partial(leave, household, "b")
        )
        assert reasons(household) == ["start", "leave"]
        ((_, _, first), (version, told, second)) = generations.begun
        assert version == told >= 8
        assert (len(first), len(second)) == (3, 2)
        generations.assert_by_formula(job, delayed_job, STASHED, STEPS)


@pytest.mark.parametrize(("lr", "is_warned"), [(0.3, False), (6.0, True)])
async def test_a_loss_that_rises_far_above_the_first_one_is_warned_of_once(
    lr: float, is_warned: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[1:].requires_grad_(False)  # updates are linear then: a loss that rises, and no NaN
    data = TensorDataset(x := torch.randn(64, 8), 3 * x.sum(1, keepdim=True))
    job = Job(model, data, nn.functional.mse_loss, SGD(lr=lr), batch_size=8, epochs=2)
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 15)).run()
        said = [event.message for event in household.events if isinstance(event, Warning)]
        of_loss = [message for message in said if "may diverge" in message]
        assert len(of_loss) == is_warned, household.losses
        assert all("--mode sync" in message for message in of_loss)


async def test_who_comes_is_taken_in() -> None:
    job = delayed_job()
    settings = RecoverySettings(newcomer_settle_seconds=0.0)
    async with devices(2, settings=settings) as household:

        async def join() -> None:
            await household.mesh.join("c")
            household.start("c")

        generations = await course(household, job, options(2, STASHED, 150), 3, join)
        generations.assert_by_formula(job, delayed_job, STASHED, 150)
        if "join" in reasons(household):  # where that pays, by times measured here and now
            assert all(version == told for version, told, _ in generations.begun)


@pytest.mark.parametrize("recovery", [ReplanMethod.LIGHT, ReplanMethod.HEAVY, ReplanMethod.RESPIPE])
async def test_a_death_before_anything_was_copied_goes_back_to_the_first_weights(
    recovery: ReplanMethod,
) -> None:
    job = delayed_job()
    async with devices(3) as household:
        chosen = options(3, STASHED, 12, recovery=recovery, replicas=False)

        async def kill() -> None:
            await household.mesh.kill("c")

        generations = await course(household, job, chosen, 5, kill)
        assert [version for version, _, _ in generations.begun] == [0, 0]
        generations.assert_by_formula(job, delayed_job, STASHED, 12)


async def test_a_private_job_has_both_ends_at_home() -> None:
    job = delayed_job()
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 12, private=True)).run()
        places = [[d.name for d in stage.devices] for stage in household.plan.stages]
        assert places[0] == places[-1] == ["a"]
        assert len(places) == 4
        wanted = by_formula(delayed_job(), cut_of(household), STASHED, 12)
        assert household.losses == wanted.losses
        assert_same_weights(job, wanted)


async def test_a_holder_that_is_started_again_goes_on_from_a_cut(tmp_path: Path) -> None:
    chosen = options(3, STASHED, 12)
    async with devices(3) as household:
        process = Process(household, tmp_path, delayed_job(), chosen)
        process.at_step(6)
        await process.ended()
        await household.until_waiting("b", "c")
        told = len(household.losses)
        job, generations = delayed_job(), Generations(household)
        await household.restart("a")

        with generations.watched():
            await household.holder_run(job, chosen, folder=process.left).run()
        first = next(event for event in household.events if isinstance(event, Plan))
        names = [list(stage.parameters) for stage in first.stages]
        version, before, cut = generations.begun[0]
        assert version <= told == before
        undisturbed = by_formula(delayed_job(), names, STASHED, told)
        wanted = by_formula(delayed_job(), names, STASHED, 12, empty={version: cut})
        assert household.losses == undisturbed.losses + wanted.losses[told:]
        assert_same_weights(job, wanted)


@pytest.mark.parametrize("batch_size", [8, 24, 48])
async def test_checkpoints_are_cuts_to_resume_from(tmp_path: Path, batch_size: int) -> None:
    """Epochs of 6, 2 and 1 mini-batches: borders closer than the pipeline is deep hold up none."""
    make = partial(delayed_job, batch_size=batch_size)
    folder = tmp_path / "checkpoints"
    async with devices(3) as household:
        await household.holder_run(make(), options(3, STASHED, 7, checkpoint=folder)).run()
        names = cut_of(household)
    found = load(folder, pytest.fail)
    assert found.progress.step == 7
    job = make()
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 12, resume=folder)).run()
        later = cut_of(household)
    wanted = by_formula(make(), names, STASHED, 12, empty={7: later})
    assert household.losses == wanted.losses[7:]
    assert_same_weights(job, wanted)


async def test_a_loss_that_is_not_finite_stops_with_its_step_and_unit() -> None:
    job = job_that_ends_in_nan()
    async with devices(3) as household:
        where = 'nan at step 1. The first NaN or infinity came from layer "[12]"'
        with pytest.raises(TrainingError, match=where):
            await household.holder_run(job, options(3, STASHED, 5)).run()
        await household.until_idle("b")


@pytest.mark.parametrize("planner", ["auto", "dp", "pipedream", "hybrid", "ftpipehd", "single"])
async def test_whatever_plan_is_found_its_depths_say_what_is_computed(planner: str) -> None:
    job = delayed_job()
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 10, planner=planner)).run()
        counts = {0: [len(stage.devices) for stage in household.plan.stages]}
        names = cut_of(household)
        wanted = by_formula(delayed_job(), names, STASHED, 10, devices=counts)
        assert household.losses == wanted.losses
        assert_same_weights(job, wanted)


async def test_a_model_with_running_statistics_has_one_device_a_stage() -> None:
    job = delayed_job("cnn")
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 4, planner="auto")).run()
        assert all(len(stage.devices) == 1 for stage in household.plan.stages)
    async with devices(2) as household:
        await household.holder_run(job, options(2, STASHED, 4, planner="pipedream")).run()
        assert [len(stage.devices) for stage in household.plan.stages] == [1, 1]
    async with devices(2) as household:
        with pytest.raises(PlanError, match="running statistics are of all mini-batches in order"):
            await household.holder_run(job, options(2, STASHED, 4, planner="dp")).run()


async def test_a_job_that_has_no_meaning_so_ends_before_anybody_is_asked() -> None:
    async with devices(2) as household:
        with pytest.raises(OptionError, match="clip_grad_norm needs"):
            await household.holder_run(
                delayed_job(clip_grad_norm=1.0), replace(options(2, STASHED, 5))
            ).run()
        assert not household.members["b"].service.slot.job
