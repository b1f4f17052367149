"""A job of which only what it costs counts: a network on random data, its labels too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import p2ptrain

CLASSES = 10


def random_job(
    network: nn.Module,
    shape: Sequence[int],
    *,
    samples: int,
    optimizer: p2ptrain.SGD,
    batch_size: int,
    micro_batch: int,
) -> p2ptrain.Job:
    """`network` takes samples of `shape`, float32, and tells CLASSES numbers of each."""
    return p2ptrain.Job(
        model=network,
        data=torch.utils.data.TensorDataset(
            torch.randn(samples, *shape), torch.randint(CLASSES, (samples,))
        ),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        batch_size=batch_size,
        micro_batch=micro_batch,
        epochs=1000,
    )
