"""A household that trains without a barrier does what the papers' formulas say, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2ptrain import events
from p2ptrain.events import Eval
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.model.stage.optimizer_spec import Adam
from p2ptrain.plan.types.weight_versions import Weights
from tests.integration.training.delayed import by_formula, cut_of, delayed_job, options
from tests.integration.training.household import devices
from tests.integration.training.jobs import assert_same_weights, assert_undisturbed

STASHED, VERTICAL = AsyncOptions(), AsyncOptions(Weights.VERTICAL)


@pytest.mark.parametrize(
    ("name", "count", "how"),
    [
        ("mlp", 4, STASHED),
        ("cnn", 3, STASHED),
        ("residual", 2, STASHED),
        ("cnn", 4, VERTICAL),
        ("mlp", 3, AsyncOptions(aggregate=1)),
        ("mlp", 4, AsyncOptions(Weights.VERTICAL, 2)),
        ("mlp", 3, AsyncOptions(Weights.UNSTASHED)),
    ],
)
async def test_losses_and_weights_are_those_of_the_formula(
    name: str, count: int, how: AsyncOptions
) -> None:
    job, steps = delayed_job(name), 20
    async with devices(count) as household:
        await household.holder_run(job, options(count, how, steps)).run()
    names = cut_of(household)
    assert len(names) == count
    assert_undisturbed(household, job, by_formula(delayed_job(name), names, how, steps))
    told = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert any("with --no-stashing" in line for line in told) is (how.weights is Weights.UNSTASHED)


async def test_forty_mini_batches() -> None:
    job, how = delayed_job(), AsyncOptions(aggregate=2)
    async with devices(4) as household:
        await household.holder_run(job, options(4, how, 40)).run()
    wanted = by_formula(delayed_job(), cut_of(household), how, 40)
    assert_undisturbed(household, job, wanted)


async def test_another_optimizer_and_a_learning_rate_that_changes_while_batches_are_under_way() -> (
    None
):
    """Update t has the learning rate of mini-batch t, in every stage."""

    def schedule(update: int) -> float:
        return 1.0 if update < 5 else 0.3 / update

    settings = {"optimizer": Adam(lr=0.01), "schedule": schedule}
    job = delayed_job(**settings)
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 15)).run()
    wanted = by_formula(delayed_job(**settings), cut_of(household), STASHED, 15)
    assert_undisturbed(household, job, wanted)


async def test_groups_with_schedules_of_their_own() -> None:
    def schedule(update: int) -> float:
        return 0.5 ** (update // 4)

    def grouped() -> Job:
        job = delayed_job()
        two = [p for p in job.model.parameters() if p.dim() > 1]
        one = [p for p in job.model.parameters() if p.dim() < 2]
        theirs = torch.optim.Adagrad([{"params": two}, {"params": one, "lr": 0.02}], lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, schedule)
        return replace(job, optimizer=theirs, scheduler=scheduler)

    job = grouped()
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 15)).run()
    wanted = by_formula(grouped(), cut_of(household), STASHED, 15, schedule=schedule)
    assert_undisturbed(household, job, wanted)


async def test_two_versions_with_divided_mini_batches() -> None:
    how = AsyncOptions(Weights.DOUBLE)
    job = delayed_job(micro_batch=2)
    async with devices(3) as household:
        await household.holder_run(job, options(3, how, 12)).run()
    wanted = by_formula(delayed_job(), cut_of(household), how, 12, micro_batch=2)
    assert_undisturbed(household, job, wanted)


async def test_an_evaluation_empties_the_pipeline() -> None:
    data = delayed_job().data
    metrics = {"largest": lambda output, target: output.max()}
    job = delayed_job(eval_data=data, metrics=metrics)
    async with devices(3) as household:
        await household.holder_run(job, options(3, STASHED, 14)).run()
    names = cut_of(household)
    wanted = by_formula(delayed_job(), names, STASHED, 14, empty=dict.fromkeys((6, 12), names))
    assert_undisturbed(household, job, wanted)
    evaluations = [event for event in household.events if isinstance(event, Eval)]
    assert [event.step for event in evaluations] == [6, 12, 14]


async def test_one_device_alone_is_never_late() -> None:
    """Then it is plain training, mini-batch by mini-batch."""
    job = delayed_job()
    async with devices(1) as household:
        await household.holder_run(job, options(1, STASHED, 10, local=True)).run()
    wanted = by_formula(delayed_job(), [list(job.model.state_dict())], STASHED, 10)
    assert household.losses == wanted.losses
    assert_same_weights(job, wanted)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
