"""A job for system tests: a small network with BatchNorm on random data, seconds long."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain


def job(samples: int = 256, width: int = 8, epochs: int = 2) -> p2ptrain.Job:
    """Convolutions, BatchNorm, linear layers: enough units for several devices."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    torch.manual_seed(1)
    return p2ptrain.Job(
        model=nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 64, 32),
            nn.ReLU(),
            nn.Linear(32, 4),
        ),
        data=torch.utils.data.TensorDataset(images, labels),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.05, momentum=0.9),
        batch_size=32,
        micro_batch=8,
        epochs=epochs,
    )
