"""Parameters and buffers among a model's outputs, as uncertainty weighting returns variances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.stage import Stage

_X, _Y = torch.randn(4, 8), torch.tensor([0, 3, 1, 2])


class _Returns(nn.Module):
    """Returns its first weights, which its loss does not look at, and how often it has run."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.log_vars = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layers(x), self.layers[0].weight, self.log_vars, self.calls


def _loss(output: Any, target: Tensor) -> Tensor:
    variances: Tensor = output[2]
    return cross_entropy(output[0], target) + (variances * variances.exp()).sum()


def _stages(captured: Captured) -> list[Stage]:
    units = range(len(captured.description.units))
    return [Stage(captured.description, k, k + 1, captured.state()) for k in units]


def _evaluated(stages: list[Stage]) -> list[Tensor]:
    values = [_X]
    for stage in stages:
        values = stage.evaluate(values, [_Y])
    return values


def test_what_is_returned_as_it_is_crosses_all_units() -> None:
    model = _Returns()
    stages = _stages(capture(model, _loss, (_X, _Y)))
    assert len(stages) > 2
    _, *got = _evaluated(stages)
    expected = model.eval()(_X)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_what_is_returned_stays_as_it_was_when_its_tensor_changes() -> None:
    """Metrics read it later, when the next piece is computed or an update made."""
    stages = _stages(capture(_Returns(), _loss, (_X, _Y)))
    _, _, weight, _, calls = _evaluated(stages)
    before = weight.clone()
    _evaluated(stages)
    for stage in stages:
        for parameter in stage.parameters().values():
            with torch.no_grad():
                parameter.add_(1)
    assert calls == 1
    assert torch.equal(weight, before)
    assert not weight.requires_grad


class _Recurrent(nn.Module):
    """A trace changes a list that its layer keeps: two calls of it are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)
        self.log_vars = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.out(self.layer(x[:, None])[0][:, 0]), None, self.log_vars


@pytest.mark.parametrize("loss", [_loss, lambda output, target: cross_entropy(output[0], target)])
def test_a_recurrent_model_may_return_its_state(loss: Any) -> None:
    model = _Recurrent()
    _, *got = _evaluated(_stages(capture(model, loss, (_X, _Y))))
    output, _, variances = model.eval()(_X)
    assert torch.equal(got[0], output)
    assert torch.equal(got[1], variances)
