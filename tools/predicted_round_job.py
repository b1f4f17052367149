"""The jobs that `tools/predicted_round.py` times: three models, random weights and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

import p2ptrain
from tests.zoo_models import TransformerBlock
from tools.random_job import CLASSES, random_job

SAMPLES = 4096
FEATURES = 256
TOKENS, WIDTH = 32, 64


def job(model: str = "mlp", batch_size: int = 128, micro_batch: int = 16) -> p2ptrain.Job:
    """Only the time counts."""
    torch.manual_seed(0)
    network, shape = MODELS[model]()
    return random_job(
        network,
        shape,
        samples=SAMPLES,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        micro_batch=micro_batch,
    )


def _mlp() -> tuple[nn.Module, Sequence[int]]:
    """Many parameters for its time: the update counts."""
    widths = (FEATURES, *[768] * 6)
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)), (FEATURES,)


def _cnn() -> tuple[nn.Module, Sequence[int]]:
    """Large activations for its time: the links count."""
    layers: list[nn.Module] = []
    for one, other in ((3, 16), (16, 16), (16, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(one, other, 3, padding=1), nn.ReLU()]
        if one != other and other == 32:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 256, CLASSES)), (3, 32, 32)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TransformerBlock(WIDTH, 4, TOKENS) for _ in range(6)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(x).mean(1))
        return output


def _transformer() -> tuple[nn.Module, Sequence[int]]:
    """Many small operators."""
    return _Transformer(), (TOKENS, WIDTH)


MODELS: dict[str, Callable[[], tuple[nn.Module, Sequence[int]]]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "transformer": _transformer,
}
