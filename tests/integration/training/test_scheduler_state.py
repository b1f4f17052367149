"""Rates go on to the bit: the scheduler's state outlives its device, its process and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from p2ptrain import events
from p2ptrain.events import Eval, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import one_stage_each
from tests.integration.training.test_optimizers import (
    SCHEDULERS,
    SIZES,
    STEPS,
    Optimizer,
    assert_same,
    in_two_groups,
    job,
    plain,
)
from tests.integration.training.test_recovery_holder import again, killed
from tests.support import zoo

KINDS = ("one cycle", "sequential", "lambdas")


def rates_of(household: Devices) -> list[Any]:
    return [event.lrs for event in household.events if isinstance(event, Step)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_holder_goes_on_with_the_same_rates(tmp_path: Path, kind: str) -> None:
    def made() -> Job:
        return job("mlp", in_two_groups("RMSprop"), SCHEDULERS[kind])

    async with devices(3) as household:
        process = await killed(household, tmp_path, 4, made(), one_stage_each(3, STEPS))
        trained = made()
        await again(household, process, trained, one_stage_each(3, STEPS))
        wanted = plain("mlp", in_two_groups("RMSprop"), SCHEDULERS[kind])
        assert_same(trained, household.events, wanted)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_checkpoint_goes_on_with_the_same_rates(tmp_path: Path, kind: str) -> None:
    def made() -> Job:
        return job("mlp", in_two_groups("NAdam"), SCHEDULERS[kind])

    async with devices(2) as household:
        kept = TrainOptions(wait_for=2, planner="pp", steps=4, checkpoint=tmp_path)
        await household.holder_run(made(), kept).run()
        trained, wanted = made(), plain("mlp", in_two_groups("NAdam"), SCHEDULERS[kind])
        alone = TrainOptions(steps=STEPS, resume=tmp_path, local=True)
        await household.holder_run(trained, alone).run()
        assert_same(trained, household.events, wanted)


def plateau(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="min", factor=0.5, patience=0, threshold=0.3
    )


def size(output: Tensor, _target: Tensor) -> float:
    """It falls, and too slowly for the scheduler."""
    return float(output.square().mean())


def watched() -> Job:
    data = zoo.make("mlp").data
    how: Mapping[str, Any] = {"eval_data": data[:8], "metrics": {"size": size}}
    return job("mlp", in_two_groups("SGD"), plateau, scheduler_metric="size", epochs=5, **how)


def expected(values: Sequence[float]) -> list[Any]:
    theirs = in_two_groups("SGD")(zoo.make("mlp").model)
    scheduler: Any = plateau(theirs)
    rates: list[Any] = []
    for value in values:
        rates += [tuple(group["lr"] for group in theirs.param_groups)] * 3
        scheduler.step(value)
    return rates


def seen(household: Devices) -> list[float]:
    return [event.metrics["size"] for event in household.events if isinstance(event, Eval)]


@pytest.mark.parametrize("step", [4, 6, 9])
async def test_a_plateau_outlives_the_holders_process(tmp_path: Path, step: int) -> None:
    async with devices(2) as household:
        await household.holder_run(watched(), one_stage_each(2, 15)).run()
        undisturbed = rates_of(household), household.losses
        assert undisturbed[0] == expected(seen(household))
        assert len({*undisturbed[0]}) > 2, "it is lowered more than once"
    async with devices(2) as household:
        process = await killed(household, tmp_path, step, watched(), one_stage_each(2, 15))
        await again(household, process, watched(), one_stage_each(2, 15))
        assert (rates_of(household), household.losses) == undisturbed


async def test_a_plateau_outlives_a_checkpoint(tmp_path: Path) -> None:
    async with devices(2) as household:
        await household.holder_run(watched(), one_stage_each(2, 15)).run()
        undisturbed = rates_of(household), household.losses
        household.events.clear()
        first = TrainOptions(wait_for=2, planner="pp", steps=9, checkpoint=tmp_path)
        await household.holder_run(watched(), first).run()
        second = TrainOptions(wait_for=2, planner="pp", steps=15, resume=tmp_path)
        await household.holder_run(watched(), second).run()
        assert (rates_of(household), household.losses) == undisturbed


async def test_a_job_is_trained_twice_with_the_same_rates() -> None:
    """Its scheduler is taken as it was when the Job was made."""
    async with devices(1) as household:
        one = job("mlp", in_two_groups("SGD"), SCHEDULERS["one cycle"])
        for _ in range(2):
            await household.holder_run(one, TrainOptions(local=True, steps=STEPS)).run()
    rates = rates_of(household)
    assert rates[:STEPS] == rates[STEPS:]


async def test_state_of_training_before_is_taken_over() -> None:
    """Two epochs in plain torch, the next two here: as four in plain torch."""

    def pretrained(optimizer: Callable[[Any], Optimizer], steps: int) -> tuple[Any, Optimizer]:
        made = zoo.make("mlp")
        theirs = optimizer(made.model)
        x = torch.stack([sample[0] for sample in made.data])
        for step in range(steps):
            made.model(x[step : step + 8]).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
        return made, theirs

    for name in ("Adam", "Adagrad", "Adafactor"):
        made, theirs = pretrained(in_two_groups(name), 3)
        ours = Job(made.model, made.data, made.loss, theirs, epochs=9, **SIZES)
        async with devices(2) as household:
            await household.holder_run(ours, one_stage_each(2, 4)).run()
        again_made, optimizer = pretrained(in_two_groups(name), 3)
        wanted = plain_on(again_made, optimizer, 4)
        assert household.losses == wanted
        for key, tensor in ours.model.state_dict().items():
            assert torch.equal(tensor, again_made.model.state_dict()[key]), (name, key)


def plain_on(made: Any, optimizer: Optimizer, steps: int) -> list[float]:
    """The contract's loop, with an optimizer that there is."""
    losses = []
    for step in range(steps):
        epoch, place = divmod(step, 3)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch))
        batch = order[place * 16 : place * 16 + 16]
        total = 0.0
        for q in batch.split(8):
            x = torch.stack([made.data[i][0] for i in q.tolist()])
            y = torch.stack([made.data[i][1] for i in q.tolist()])
            loss = made.loss(made.model(x), y)
            (loss * 0.5).backward()
            total += loss.item() * 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


async def test_what_is_in_no_group_is_not_trained_and_that_is_said() -> None:
    made = zoo.make("mlp")
    first = dict(made.model.state_dict())["0.weight"].clone()
    rest = [p for name, p in made.model.named_parameters() if not name.startswith("0.")]
    ours = Job(made.model, made.data, made.loss, torch.optim.Adam(rest, lr=0.01), **SIZES)
    async with devices(2) as household:
        await household.holder_run(ours, one_stage_each(2, 3)).run()
    again_made = zoo.make("mlp")
    others = [p for name, p in again_made.model.named_parameters() if not name.startswith("0.")]
    assert household.losses == plain_on(again_made, torch.optim.Adam(others, lr=0.01), 3)
    assert torch.equal(made.model.state_dict()["0.weight"], first)
    assert made.model[0].weight.requires_grad, "as the user left it"
    said = [event.message for event in household.events if isinstance(event, events.Warning)]
    assert any("'0.weight', '0.bias' require a gradient" in message for message in said)
