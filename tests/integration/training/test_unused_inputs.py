"""Inputs that a model, or one of its modes, does not use: a job trains and evaluates all the same.

As with a tokenizer's `token_type_ids`, a label that only training reads, a bias of evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from p2ptrain.events import Eval
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from tests.integration.training.household import devices
from tests.support import reference


class Words(nn.Module):
    """Classifies what it reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(20, 8), nn.Dropout(dropout)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, kinds: Tensor, label: Tensor, bias: Tensor) -> Tensor:
        read = torch.tanh(self.words(ids)).mean(1)
        return self.scored(self.out(torch.tanh(self.hidden(self.drop(read)))), label, bias)

    def scored(self, output: Tensor, label: Tensor, bias: Tensor) -> Tensor:
        return output


class ByMode(Words):
    """Reads one more leaf in training, and another one in evaluation."""

    def scored(self, output: Tensor, label: Tensor, bias: Tensor) -> Tensor:
        return output - 0.3 * one_hot(label, 4) if self.training else output + bias


class Blind(Words):
    """Learns how often each class comes."""

    def forward(self, ids: Tensor, kinds: Tensor, label: Tensor, bias: Tensor) -> Tensor:
        first = self.words.weight[:1].expand(ids.shape[0], 8)
        output: Tensor = self.out(torch.tanh(self.hidden(first)))
        return output


def samples(count: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    torch.manual_seed(1)
    made = []
    for _ in range(count):
        label = torch.randint(4, ())
        ids, kinds = torch.randint(20, (6,)), torch.zeros(6, dtype=torch.int64)
        made.append(({"ids": ids, "kinds": kinds, "label": label, "bias": torch.randn(4)}, label))
    return made


def job(model: Callable[[], nn.Module]) -> Job:
    torch.manual_seed(0)
    return Job(
        model=model(),
        data=samples(24),
        loss=cross_entropy,
        optimizer=SGD(lr=0.1),
        batch_size=12,
        micro_batch=4,
        eval_data=samples(7),
        metrics={"score": cross_entropy},
    )


async def trained(made: Job, planner: str) -> tuple[list[float], dict[str, float]]:
    """Losses, and what the evaluation after the last epoch gave."""
    async with devices(2) as household:
        await household.holder_run(made, TrainOptions(wait_for=2, planner=planner)).run()
        (evaluated,) = [event for event in household.events if isinstance(event, Eval)]
        return household.losses, dict(evaluated.metrics)


def plain(made: Job) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses, the metric and the trained weights of the plain loop."""
    recipe = reference.Recipe(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=12, micro_batch=4
    )
    outcome = reference.train(made.model, made.data, made.loss, recipe)
    made.model.load_state_dict(outcome.state_dict)
    x, y = reference.stack(made.eval_data)
    with torch.no_grad():
        score = float(cross_entropy(reference.call(made.model.eval(), x), y))
    return outcome.losses, score, outcome.state_dict


@pytest.mark.parametrize(
    ("model", "planner"),
    [(Words, "pp"), (Words, "dp"), (ByMode, "pp"), (ByMode, "hybrid"), (Blind, "dp")],
)
async def test_it_trains_and_evaluates_as_plain_torch_does(
    model: Callable[[], nn.Module], planner: str
) -> None:
    losses, score, state = plain(job(model))
    made = job(model)
    found, metrics = await trained(made, planner)
    assert found == pytest.approx(losses, rel=1e-6)
    assert metrics["score"] == pytest.approx(score, rel=1e-5)
    for name, tensor in made.model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("planner", ["pp", "dp"])
async def test_it_trains_where_nothing_is_tried_beforehand(planner: str) -> None:
    """Dropout keeps the samples from being tried before the plan; masks are this package's own."""

    def wobbly() -> Any:
        return ByMode(0.2)

    alone = job(wobbly)
    async with devices(1) as household:
        await household.holder_run(alone, TrainOptions(local=True)).run()
        expected = household.losses
    losses, _ = await trained(job(wobbly), planner)
    assert losses == pytest.approx(expected, rel=1e-6)
