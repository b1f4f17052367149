"""Models that cannot compute one sample are trained as plain torch trains them: no plan and no
profile has a piece of one, and no evaluation leaves one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from p2ptrain.events import Eval
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from tests.integration.training.household import devices
from tests.support import reference

BATCH = 12


def layers(width: int) -> nn.Sequential:
    parts = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, width)
    return nn.Sequential(*parts)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze()


def hardest(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="none").topk(count).values.mean()

    return loss


def make(name: str) -> tuple[nn.Module, Callable[[Any, Any], Tensor], list[Any]]:
    torch.manual_seed(0)
    if name == "squeeze":
        probabilities = [(torch.randn(8), torch.rand(()).round()) for _ in range(24)]
        return Dropping(), binary_cross_entropy_with_logits, probabilities
    labelled = [(torch.randn(8), torch.randint(4, ())) for _ in range(24)]
    return layers(4), hardest(int(name)), labelled


async def trained(
    name: str, micro_batch: int | None, options: TrainOptions
) -> tuple[list[float], int]:
    """Losses of the steps, and the micro-batch of the plan."""
    model, loss, data = make(name)
    sgd = SGD(lr=0.1, momentum=0.9)
    job = Job(model, data, loss, sgd, BATCH, micro_batch, epochs=2)
    async with devices(options.wait_for) as household:
        await household.holder_run(job, options).run()
        return household.losses, household.plan.micro_batch


def plain(name: str, micro_batch: int) -> list[float]:
    model, loss, data = make(name)
    recipe = reference.Recipe(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=BATCH,
        micro_batch=micro_batch,
        epochs=2,
    )
    return reference.train(model, data, loss, recipe).losses


@pytest.mark.parametrize(
    ("name", "micro_batch", "planner"),
    [
        ("squeeze", 4, "local"),
        ("squeeze", 4, "pp"),
        ("squeeze", 4, "auto"),
        ("squeeze", None, "hybrid"),
        ("squeeze", None, "dp"),
        ("2", 4, "hybrid"),
        ("5", 6, "pp"),
        ("5", None, "auto"),
    ],
)
async def test_it_trains_as_plain_torch_does(
    name: str, micro_batch: int | None, planner: str
) -> None:
    options = TrainOptions(wait_for=3, planner=planner)
    if planner == "local":
        options = TrainOptions(local=True)
    losses, planned = await trained(name, micro_batch, options)
    assert planned == micro_batch or micro_batch is None
    assert losses == pytest.approx(plain(name, planned), rel=1e-6)


async def test_an_evaluation_of_nine_samples_leaves_none_of_one() -> None:
    """Three times three, as the three hardest want it, and not 4 + 4 + 1."""
    model, loss, data = make("3")
    sgd = SGD(lr=0.1)
    job = Job(model, data, loss, sgd, BATCH, 4, epochs=2, eval_data=data[:9])
    async with devices(2) as household:
        await household.holder_run(job, TrainOptions(wait_for=2, planner="pp")).run()
        found = [event.metrics["loss"] for event in household.events if isinstance(event, Eval)]
    inputs, targets = (torch.stack(column) for column in zip(*data[:9], strict=True))
    pieces = zip(inputs.split(3), targets.split(3), strict=True)
    losses = [loss(model(x), y).item() for x, y in pieces]
    assert len(found) == 2
    assert found[-1] == pytest.approx(sum(losses) / 3, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(local=True),
        TrainOptions(wait_for=2, planner="pp"),
        TrainOptions(wait_for=2, planner="pp", mode="async"),
    ],
    ids=["local", "rounds", "asynchronous"],
)
async def test_an_evaluation_may_need_larger_pieces_than_training(options: TrainOptions) -> None:
    """13 samples in fours or threes leave one: it is 5 + 5 + 3."""
    model, loss, data = make("3")
    job = Job(model, data, loss, SGD(lr=0.1), 4, epochs=1, eval_data=data[:13])
    async with devices(options.wait_for) as household:
        await household.holder_run(job, options).run()
        (found,) = (event.metrics["loss"] for event in household.events if isinstance(event, Eval))
    inputs, targets = (torch.stack(column) for column in zip(*data[:13], strict=True))
    pieces = zip(inputs.split(5), targets.split(5), strict=True)
    losses = [loss(model(x), y).item() * len(y) / 13 for x, y in pieces]
    assert found == pytest.approx(sum(losses), rel=1e-6)
