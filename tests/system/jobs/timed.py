"""A job whose rounds are timed: large activations for its time, random data."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain

SAMPLES, CLASSES = 4096, 10


def job(batch_size: int = 128, micro_batch: int = 32) -> p2ptrain.Job:
    """Convolutions on 3 x 32 x 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for one, other in ((3, 16), (16, 16), (16, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(one, other, 3, padding=1), nn.ReLU()]
        if one != other and other == 32:
            layers.append(nn.MaxPool2d(2))
    return p2ptrain.Job(
        model=nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 256, CLASSES)),
        data=torch.utils.data.TensorDataset(
            torch.randn(SAMPLES, 3, 32, 32), torch.randint(CLASSES, (SAMPLES,))
        ),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        micro_batch=micro_batch,
        epochs=1000,
    )
