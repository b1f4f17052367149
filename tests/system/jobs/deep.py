"""A job for system tests of equal layers, so that any number of devices gets equal parts."""

from __future__ import annotations

import torch
from torch import nn

import p2ptrain

LAYERS = 6


def job(
    width: int = 768,
    samples: int = 256,
    batch_size: int = 128,
    micro_batch: int = 32,
    adam: bool = False,
    epochs: int = 1000,
) -> p2ptrain.Job:
    """A layer is worth many messages, so that every device pays.

    With a width of 2048 and Adam its weights and their state need memory (400 MB), not its
    activations.
    """
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, width, generator=generator)
    labels = torch.randint(0, 4, (samples,), generator=generator)
    torch.manual_seed(1)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    return p2ptrain.Job(
        model=nn.Sequential(*layers, nn.Linear(width, 4)),
        data=torch.utils.data.TensorDataset(inputs, labels),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.Adam(lr=0.001) if adam else p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        micro_batch=micro_batch,
        epochs=epochs,
    )
