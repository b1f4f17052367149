"""Models that return something else in evaluation mode, or their own tensors, on three devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain import events
from p2ptrain.events import Eval
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD
from tests.integration.training.household import Devices, devices


class Auxiliary(nn.Module):
    """A second head in training only, as GoogLeNet and Inception have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aside = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.body(x))
        return (self.main(x), self.aside(x)) if self.training else self.main(x)


class Weighted(nn.Module):
    """Returns variances for its loss, and weights of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner, self.main = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.log_vars = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.inner(torch.relu(self.body(x))))
        return self.main(x), self.log_vars, self.body.weight


def two_heads(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output[0], target) + 0.3 * cross_entropy(output[1], target)


def weighted(output: Any, target: Tensor) -> Tensor:
    logits, variances, weight = output
    scaled: Tensor = cross_entropy(logits, target) * torch.exp(-variances[0])
    return scaled + variances.sum() + 0.01 * weight.pow(2).sum()


METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "accuracy": lambda o, y: (o.argmax(1) == y).float().mean(),
    "spread": lambda o, y: o[1].sum() + o[2].pow(2).sum(),
}


def job(model: nn.Module, loss: Any, metric: str) -> Job:
    torch.manual_seed(0)
    data = [(torch.randn(12), int(torch.randint(4, ()))) for _ in range(24)]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    sizes = {"batch_size": 12, "micro_batch": 4, "epochs": 2}
    metrics = {metric: METRICS[metric]}
    return Job(model, data, loss, SGD(lr=0.1), eval_data=data[:8], metrics=metrics, **sizes)


async def trained(job: Job, planner: str) -> tuple[Devices, dict[str, float]]:
    async with devices(3) as household:
        await household.holder_run(job, TrainOptions(wait_for=3, planner=planner)).run()
        return household, [e for e in household.events if isinstance(e, Eval)][-1].metrics


def expected(job: Job, metric: str) -> float:
    """Of the trained model, by plain torch."""
    x, y = torch.stack([x for x, _ in job.data][:8]), torch.tensor([y for _, y in job.data][:8])
    with torch.no_grad():
        return float(METRICS[metric](job.model.eval()(x), y))


@pytest.mark.parametrize("planner", ["pp", "dp"])
async def test_heads_that_only_training_has_leave_the_loss_out_of_evaluations(planner: str) -> None:
    made = job(Auxiliary(), two_heads, "accuracy")
    household, metrics = await trained(made, planner)
    assert metrics == {"accuracy": pytest.approx(expected(made, "accuracy"))}
    told = [e.message for e in household.events if isinstance(e, events.Warning)]
    assert len([message for message in told if "in evaluation mode" in message]) == 1


@pytest.mark.parametrize("planner", ["pp", "dp"])
async def test_parameters_among_the_outputs_reach_the_metrics(planner: str) -> None:
    made = job(Weighted(), weighted, "spread")
    household, metrics = await trained(made, planner)
    assert metrics["spread"] == pytest.approx(expected(made, "spread"))
    assert metrics["loss"] < household.losses[0]
    assert len(household.plan.stages) == (3 if planner == "pp" else 1)
