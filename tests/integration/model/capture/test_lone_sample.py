"""Whether plain torch would train a model on one sample, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2ptrain.model.capture.capture import capture


class _Folded(nn.Module):
    """Twice as many rows as samples reach its BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, 2)).reshape(x.shape[0], 4)


MODELS = {
    "no norm": lambda: nn.Linear(4, 4),
    "one value": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "no running statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "an image of one dot": lambda: nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.BatchNorm2d(4)),
    "an image of four dots": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1)),
    "two rows a sample": _Folded,
    "frozen": lambda: _Frozen(),
    "groups of one": lambda: nn.GroupNorm(4, 4),
    "groups of two": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: nn.LayerNorm(4),
}


class _Frozen(nn.Module):
    """Its BatchNorm uses the running statistics in training too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.norm.running_mean, self.norm.running_var
        return nn.functional.batch_norm(x, mean, variance, self.norm.weight, training=False)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.flatten(1) - target).square().mean()


def _torch_refuses(model: nn.Module) -> bool:
    try:
        model.train()(torch.randn(1, 4))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_tells_what_plain_torch_does_with_one_sample(name: str) -> None:
    example = (torch.randn(2, 4), torch.randn(2, 4))
    captured = capture(MODELS[name](), _loss, example, evaluation=False)
    assert captured.trains.refuses_one == _torch_refuses(MODELS[name]())
