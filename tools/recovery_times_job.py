"""The job of `tools/recovery_times.py` and `tools/chaos`: equal layers, as many as one likes."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain

SAMPLES, CLASSES = 256, 10


def job(
    width: int = 1024, layers: int = 28, batch_size: int = 16, double: bool = False
) -> p2ptrain.Job:
    """29.4 million parameters by default; random samples: only the time counts.

    Args:
        double: in float64, for plans whose sums are made in another order.
    """
    dtype = torch.float64 if double else torch.float32
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, width, generator=generator).to(dtype)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    torch.manual_seed(1)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return p2ptrain.Job(
        model=nn.Sequential(*parts, nn.Linear(width, CLASSES)).to(dtype),
        data=torch.utils.data.TensorDataset(inputs, labels),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.001, momentum=0.9),
        batch_size=batch_size,
        micro_batch=batch_size // 4,
        epochs=1_000_000,
    )
