"""A job for groups of devices: double precision, so that losses compare to the last digits."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain


def job(samples: int = 240, not_finite: int = -1) -> p2ptrain.Job:
    """Linear layers on random data; sample number `not_finite` has a NaN in it."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    if not_finite >= 0:
        inputs[not_finite, 3] = torch.nan
    torch.manual_seed(1)
    return p2ptrain.Job(
        model=nn.Sequential(
            nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
        ).double(),
        data=torch.utils.data.TensorDataset(inputs, labels),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.Adam(lr=0.01),
        batch_size=30,
        micro_batch=4,
        seed=3,
    )
