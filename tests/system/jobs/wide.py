"""A job whose activations are heavy: 4 MiB cross every cut in each micro-batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import p2ptrain

SAMPLES, BATCH, MICRO_BATCH, WIDTH = 64, 64, 16, 65_536


class Widened(nn.Module):
    """Cheap work on wide values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).tanh()


def job() -> p2ptrain.Job:
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,))
    return p2ptrain.Job(
        model=nn.Sequential(
            nn.Linear(16, WIDTH, bias=False),
            Widened(),
            Widened(),
            Widened(),
            nn.AdaptiveAvgPool1d(64),
            nn.Linear(64, 4),
        ),
        data=TensorDataset(inputs, targets),
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.01),
        batch_size=BATCH,
        micro_batch=MICRO_BATCH,
        epochs=1000,
    )
