"""Each of torch's optimizers, in groups and with a scheduler, trains as plain torch does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from p2ptrain import events
from p2ptrain.events import Eval, Event, Recovered, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from tests.integration.training.group_plans import Stage, dealt, device_count, divided, force
from tests.integration.training.household import OFTEN_COPIED, devices
from tests.support import reference, zoo
from tests.support.reference import Outcome, Recipe

STEPS = 7
SIZES: Mapping[str, Any] = {"batch_size": 16, "micro_batch": 8}
"""Two micro-batches: their two gradients add up to the same bits in any order."""

NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.05, "t0": 3.0},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.01},
}

PLANS: Mapping[str, Sequence[Stage]] = {
    "alone": [divided(8)],
    "three stages": [divided(8), divided(8), divided(8)],
    "a group": [dealt(1, 1)],
}

Optimizer = torch.optim.Optimizer


def in_two_groups(name: str) -> Callable[[nn.Module], Optimizer]:
    """Matrices, and with other numbers the rest; every second matrix where it takes no others."""
    cls: Any = getattr(torch.optim, name)
    numbers = NUMBERS[name]

    def make(model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        if name == "Muon":
            matrices, others = matrices[::2], matrices[1::2]
        groups = [{"params": matrices}, {"params": others, "lr": numbers["lr"] / 2}]
        made: Optimizer = cls(groups, **numbers)
        return made

    return make


def exponential(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.8)


def plain(
    name: str,
    optimizer: Callable[[nn.Module], Optimizer],
    scheduler: Callable[[Optimizer], LRScheduler] = exponential,
    steps: int = STEPS,
    **more: Any,
) -> Outcome:
    """By the plain loop."""
    made = zoo.make(name)

    def make(_parameters: Iterable[nn.Parameter]) -> Optimizer:
        return optimizer(made.model)

    recipe = Recipe(make, scheduler=scheduler, steps=steps, epochs=99, **{**SIZES, **more})
    return reference.train(made.model, made.data, made.loss, recipe)


def job(
    name: str,
    optimizer: Callable[[nn.Module], Optimizer],
    scheduler: Callable[[Optimizer], LRScheduler] = exponential,
    **more: Any,
) -> Job:
    """The same as a user writes it."""
    made = zoo.make(name)
    theirs = optimizer(made.model)
    settings = {"epochs": 99, **SIZES, **more}
    return Job(made.model, made.data, made.loss, theirs, scheduler=scheduler(theirs), **settings)


def assert_same(trained: Job, events: Sequence[Event], wanted: Outcome) -> None:
    """Losses, rates and weights, to the bit."""
    steps = [event for event in events if isinstance(event, Step)]
    assert [event.step for event in steps] == list(range(1, len(wanted.losses) + 1))
    assert [event.lrs for event in steps] == wanted.rates
    assert [event.loss for event in steps] == wanted.losses
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, wanted.state_dict[name]), name


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NUMBERS)
async def test_every_class_in_two_groups_is_plain_torchs(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: str
) -> None:
    force(monkeypatch, PLANS[plan])
    trained = job("mlp", in_two_groups(name))
    before = trained.optimizer.state_dict()  # type: ignore[union-attr]
    count = device_count(PLANS[plan])
    options = TrainOptions(wait_for=count, steps=STEPS, local=count == 1)
    async with devices(count) as household:
        await household.holder_run(trained, options).run()
    assert_same(trained, household.events, plain("mlp", in_two_groups(name)))
    assert trained.scheduler is not None
    assert trained.scheduler.last_epoch == STEPS, "as after plain torch's loop"
    assert before["state"].keys() == trained.optimizer.state_dict()["state"].keys()  # type: ignore[union-attr]


async def test_gradients_from_before_the_job_are_named_and_not_added() -> None:
    trained = job("mlp", in_two_groups("SGD"))
    for parameter in trained.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    async with devices(1) as household:
        await household.holder_run(trained, TrainOptions(local=True, steps=STEPS)).run()
    assert_same(trained, household.events, plain("mlp", in_two_groups("SGD")))
    warned = [event.message for event in household.events if isinstance(event, events.Warning)]
    first = next(name for name, _ in trained.model.named_parameters())
    assert [words.startswith(f"{first!r}, ") for words in warned] == [True]
    assert ".grad holds gradients from before the Job" in warned[0]


@pytest.mark.parametrize("name", ["SGD", "Adafactor", "Adagrad", "ASGD", "NAdam"])
async def test_a_death_changes_nothing(name: str) -> None:
    """Copies, rebuilds and moves carry whatever the class keeps."""
    trained = job("mlp", in_two_groups(name))
    killed: list[asyncio.Task[None]] = []
    async with devices(3, settings=OFTEN_COPIED) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 8:
                killed.append(asyncio.create_task(household.mesh.kill("c")))

        options = TrainOptions(wait_for=3, planner="pp", steps=14)
        await household.holder_run(trained, options, listen).run()
        await killed[0]
    assert any(isinstance(event, Recovered) for event in household.events)
    assert_same(trained, household.events, plain("mlp", in_two_groups(name), steps=14))


async def test_a_tied_weight_has_its_groups_numbers_in_both_stages() -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        named = dict(model.named_parameters())
        tied = [p for n, p in named.items() if p.dim() > 1 and p.shape[0] == zoo.VOCABULARY]
        others = [p for p in named.values() if all(p is not one for one in tied)]
        assert tied
        return torch.optim.AdamW([{"params": others}, {"params": tied, "lr": 3e-3}], lr=0.01)

    trained = job("gpt", optimizer, clip_grad_norm=0.5)
    async with devices(3) as household:
        options = TrainOptions(wait_for=3, planner="pp", steps=4)
        await household.holder_run(trained, options).run()
    places = [name for stage in household.plan.stages for name in stage.parameters]
    assert len(places) > len({*places}), "it lies in two stages"
    assert_same(trained, household.events, plain("gpt", optimizer, steps=4, clip_grad_norm=0.5))


SCHEDULERS: Mapping[str, Callable[[Optimizer], LRScheduler]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=STEPS),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "lambdas": lambda o: lr_scheduler.LambdaLR(o, [lambda u: 0.9**u, lambda u: 1.0 / (1 + u)]),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.02, anneal_epochs=3),
}


@pytest.mark.parametrize(
    ("kind", "by_epoch"), [*((kind, False) for kind in SCHEDULERS), ("cyclic", True)]
)
async def test_every_scheduler_is_plain_torchs(kind: str, *, by_epoch: bool) -> None:
    """What it writes besides the rate too: the first two move the momentum."""
    scheduler = SCHEDULERS[kind]
    interval = "epoch" if by_epoch else "update"
    trained = job("mlp", in_two_groups("SGD"), scheduler, scheduler_interval=interval)
    async with devices(2) as household:
        options = TrainOptions(wait_for=2, planner="pp", steps=STEPS)
        await household.holder_run(trained, options).run()
    wanted = plain("mlp", in_two_groups("SGD"), scheduler, by_epoch=by_epoch)
    assert_same(trained, household.events, wanted)
    assert len({*wanted.rates}) > 1, "it does something"


async def test_a_plateau_is_seen_after_evaluations() -> None:
    """Also by an asynchronous pipeline, which waits for them."""
    metrics = {"made up": lambda output, target: float(next(given))}
    given = itertools.count(1000, -1)  # each is worse than the one before

    def job_with_plateau() -> Job:
        made = zoo.make("mlp")
        theirs = in_two_groups("SGD")(made.model)
        plateau = lr_scheduler.ReduceLROnPlateau(theirs, mode="max", factor=0.5, patience=0)
        return Job(
            *(made.model, made.data, made.loss, theirs),
            **SIZES,
            epochs=4,
            eval_data=made.data[:8],
            metrics=metrics,
            scheduler=plateau,
            scheduler_metric="made up",
        )

    def expected(values: Sequence[float]) -> list[Any]:
        theirs = in_two_groups("SGD")(zoo.make("mlp").model)
        plateau = lr_scheduler.ReduceLROnPlateau(theirs, mode="max", factor=0.5, patience=0)
        rates: list[Any] = []
        for value in values:
            rates += [tuple(group["lr"] for group in theirs.param_groups)] * 3
            plateau.step(value)
        return rates

    async with devices(2) as household:
        await household.holder_run(job_with_plateau()).run()
        found = [event.metrics["made up"] for event in household.events if isinstance(event, Eval)]
        rates = [event.lrs for event in household.events if isinstance(event, Step)]
        assert rates == expected(found)
        assert len({*rates}) == 3, "twice it was no better"
        household.events.clear()
        options = TrainOptions(wait_for=2, planner="pp", mode="async")
        await household.holder_run(job_with_plateau(), options).run()
        found = [event.metrics["made up"] for event in household.events if isinstance(event, Eval)]
        rates = [event.lrs for event in household.events if isinstance(event, Step)]
        assert rates == expected(found)
