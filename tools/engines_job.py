"""A wide network on random numbers, for `tools/engines.py`: 0.4 M parameters, batches of 384."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import p2ptrain


def job(width: int = 512, batch_size: int = 384) -> p2ptrain.Job:
    """Two mini-batches again and again."""
    torch.manual_seed(0)
    x = torch.randn(2 * batch_size, 256)
    hidden = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(width, 10))
    return p2ptrain.Job(
        model,
        TensorDataset(x, x[:, :10].argmax(1)),
        nn.functional.cross_entropy,
        p2ptrain.SGD(lr=0.05, momentum=0.9),
        batch_size=batch_size,
        epochs=1000,
    )
