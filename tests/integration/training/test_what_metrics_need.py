"""What an evaluation says, and when there is nothing that it could say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.holder.input.metrics import MetricValues, missing_loss, tried
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.model.stage.optimizer_spec import SGD

_METRICS: dict[str, Callable[[Any, Any], Any]] = {"mean": lambda output, target: output.mean()}


class _Net(nn.Module):
    def __init__(self, evaluated: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.evaluated = evaluated

    def forward(self, x: Tensor) -> Any:
        x = self.out(x)
        return {"logits": x} if self.training else self.evaluated(x)


@pytest.mark.parametrize("error", [KeyError("mine"), asyncio.CancelledError(), SystemExit(3)])
def test_a_metric_that_fails_is_named(error: BaseException) -> None:
    def fails(output: object, target: object) -> float:
        raise error

    output, target = torch.ones(4, 3), torch.zeros(4)
    with pytest.raises(ScriptError, match=f"the metric 'm' failed: {type(error).__name__}"):
        tried({"m": fails}, output, target)
    later = MetricValues({"m": fails, "ones": lambda output, _: output.mean()}, frozenset())
    later.add(output, target, 4)
    assert later.result(has_loss=False) == {"ones": 1.0}
    assert later.failures["m"].startswith(type(error).__name__)


def _loss(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output["logits"], target)


def _prepared(evaluated: Callable[[Tensor], Any], metrics: Any) -> PreparedJob:
    data = [(torch.full((5,), float(n)), n % 3) for n in range(8)]
    net, sgd = _Net(evaluated), SGD(lr=0.1)
    job = Job(net, data, _loss, sgd, batch_size=4, eval_data=data, metrics=metrics)
    return prepare(job, TrainOptions())


def test_of_a_loss_that_evaluation_lacks_people_hear() -> None:
    captured = _prepared(lambda x: x, _METRICS).captured
    told = missing_loss(_METRICS, captured)
    assert "in evaluation mode" in told
    assert "takes both outputs" in told
    assert missing_loss({"loss": _METRICS["mean"]}, captured) == ""


def test_nothing_is_reported_where_there_is_a_loss() -> None:
    prepared = _prepared(lambda x: {"logits": x}, {})
    assert missing_loss({}, prepared.captured) == ""


def test_an_evaluation_with_nothing_to_say_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"in evaluation mode, .* leave out eval_data"):
        _prepared(lambda x: x, {})


def test_an_output_that_no_metric_could_be_given_is_refused_before_training() -> None:
    def spread(x: Tensor) -> Any:
        return {"logits": x, "spread": torch.distributions.Normal(x, 1.0)}

    with pytest.raises(
        CaptureError, match=r"returns a Normal in evaluation mode.*register_dataclass"
    ):
        _prepared(spread, _METRICS)
    assert _prepared(spread, {}).evaluation is not None


def test_means_have_no_loss_where_there_is_none() -> None:
    means = MetricValues(_METRICS, frozenset())
    means.add(torch.ones(2), None, 2)
    assert means.result(has_loss=False) == {"mean": 1.0}
    means.add_loss(0.5, 4)
    assert means.result(has_loss=True) == {"loss": 0.5, "mean": 1.0}


def _auroc(output: Tensor, target: Tensor) -> Tensor:
    """How often a positive sample is above a negative one; it needs both."""
    above, below = output[target == 1], output[target == 0]
    if not len(above) or not len(below):
        raise ValueError("only one class")
    return (above[:, None] > below).float().mean()


class _Accumulated:
    """As torchmetrics has them."""

    def __init__(self) -> None:
        self.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        self.outputs.append(output)
        self.targets.append(target)

    def compute(self) -> Tensor:
        return _auroc(torch.cat(self.outputs), torch.cat(self.targets))

    def reset(self) -> None:
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []


def test_metrics_that_are_no_means_are_computed_over_all_of_the_data() -> None:
    output = torch.rand(37, generator=torch.Generator().manual_seed(0))
    target = (torch.arange(37) % 3 == 0).long()
    metrics: dict[str, Any] = {
        "auroc": _auroc,
        "object": _Accumulated(),
        "right": lambda o, t: ((o > 0.5) == t).float().mean(),
        "count": lambda o, t: ((o > 0.5) == t).float().sum(),
    }
    over_all = tried(metrics, output, target)
    assert over_all == {"auroc", "count"}
    values = MetricValues(metrics, over_all)
    for piece, wanted in zip(output.split(4), target.split(4), strict=True):
        values.add(piece, wanted, len(piece))
    found = values.result(has_loss=False)
    whole = {name: float(metrics[name](output, target)) for name in ("auroc", "right", "count")}
    assert found == pytest.approx({**whole, "object": whole["auroc"]})
