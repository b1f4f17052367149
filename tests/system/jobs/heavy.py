"""A job for system tests whose weights, not its activations, need memory: 100 MB of them."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain

WIDTH, LAYERS, SAMPLES = 2048, 6, 64


def job() -> p2ptrain.Job:
    """Equal layers, so that any number of devices gets equal parts."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
    torch.manual_seed(1)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return p2ptrain.Job(
        model=nn.Sequential(*layers, nn.Linear(WIDTH, 4)),
        data=torch.utils.data.TensorDataset(inputs, labels),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.Adam(lr=0.001),
        batch_size=16,
        micro_batch=4,
        epochs=1,
    )
