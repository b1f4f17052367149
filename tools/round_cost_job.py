"""The jobs that `tools/round_cost.py` measures: little computing, much to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import p2ptrain
from tools.bench.models import mobilenetv2
from tools.random_job import CLASSES, random_job

SAMPLES = 512
WIDE, FEATURES = 2240, 32_768


def job(model: str = "wide", batch_size: int = 4, micro_batch: int = 1) -> p2ptrain.Job:
    """Only what it costs counts."""
    torch.manual_seed(0)
    if model == "mobilenetv2":
        return mobilenetv2.job(batch_size)
    network, shape = MODELS[model]()
    return random_job(
        network,
        shape,
        samples=SAMPLES,
        optimizer=p2ptrain.SGD(lr=0.001),
        batch_size=batch_size,
        micro_batch=micro_batch,
    )


def _wide() -> tuple[nn.Module, Sequence[int]]:
    """20 M parameters: sums of gradients are all that counts."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDE, WIDE), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDE, CLASSES)), (WIDE,)


def _maps() -> tuple[nn.Module, Sequence[int]]:
    """Activations of 128 KiB a sample, and their gradients, are all that counts."""
    layers = (nn.Linear(2, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 2), nn.Linear(2, CLASSES))
    return nn.Sequential(*layers), (2,)


def _small() -> tuple[nn.Module, Sequence[int]]:
    """Next to no bytes: what messages and rounds cost by themselves."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES)), (16,)


MODELS: dict[str, Callable[[], tuple[nn.Module, Sequence[int]]]] = {
    "wide": _wide,
    "maps": _maps,
    "small": _small,
}
