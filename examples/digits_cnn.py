"""Handwritten digits (1,797 real 8x8 images that come with scikit-learn), a residual network.

    p2ptrain train examples/digits_cnn.py --local
    p2ptrain train examples/digits_cnn.py --wait-for 3 -o width=32 --out digits.safetensors

Shows what a Job can say besides model and data: a scheduler, clipped gradients,
metrics on data the network has not seen, and options for the command line (`-o width=32`).
Needs scikit-learn: pip install 'p2ptrain[examples]'

Measured on x86-64 with `--threads 1`: test accuracy 0.989 after 8 epochs, the same on this device
alone (14 s of one core, starting included) as on three (`--wait-for 3 --planner pp`).
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2ptrain

TEST_SAMPLES = 360
BATCH_SIZE = 64


def job(width: int = 16, epochs: int = 8, lr: float = 0.1) -> p2ptrain.Job:
    """`width`: channels of the first half; `lr`: the highest learning rate."""
    images, test = load()
    train = DataLoader(images, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    torch.manual_seed(0)
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    return p2ptrain.Job(
        model=model,
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train)),
        micro_batch=16,
        epochs=epochs,
        clip_grad_norm=5.0,
        eval_data=DataLoader(test, batch_size=BATCH_SIZE),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
    )


def network(width: int) -> nn.Sequential:
    """(n, 1, 8, 8) -> (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        Residual(2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(2 * width * 4, 10),
    )


class Residual(nn.Module):
    """Two convolutions beside the way past them; (n, channels, h, w) stays that."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add, then clip at zero."""
        return torch.relu(x + self.body(x))


def load() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 8, 8) from 0 to 1 with their digits: training data, test data."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
