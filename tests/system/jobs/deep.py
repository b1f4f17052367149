"""A job for system tests of equal layers, so that any number of devices gets equal parts."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain

WIDTH, LAYERS, SAMPLES = 768, 6, 256


def job(epochs: int = 1000) -> p2ptrain.Job:
    """A layer is worth many messages, so that every device pays."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
    torch.manual_seed(1)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return p2ptrain.Job(
        model=nn.Sequential(*layers, nn.Linear(WIDTH, 4)),
        data=torch.utils.data.TensorDataset(inputs, labels),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=128,
        micro_batch=32,
        epochs=epochs,
    )
