"""Reads handwritten digits with a small convolutional network: the job of `p2ptrain demo`.

1,797 real 8x8 images come with scikit-learn, so nothing is downloaded. The network has BatchNorm,
whose running statistics are part of what the devices must keep exactly as one device would.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import p2ptrain

TEST_SAMPLES = 360


def job(width: int = 16) -> p2ptrain.Job:
    """Five learning layers; `width` is the number of channels of the first two."""
    train, test = digits()
    torch.manual_seed(0)
    return p2ptrain.Job(
        model=network(width),
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=0.05, momentum=0.9),
        batch_size=64,
        micro_batch=16,
        epochs=6,
        eval_data=test,
        metrics={"accuracy": accuracy},
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 8, 8), float32 from 0 to 1, with their digits, in a fixed random split."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network(width: int) -> nn.Sequential:
    """(batch, 1, 8, 8) -> (batch, 10)."""
    return nn.Sequential(
        convolution(1, width),
        convolution(width, width),
        nn.MaxPool2d(2),
        convolution(width, 2 * width),
        convolution(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 2 * 2, 10),
    )


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """Same height and width."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of the digits read correctly."""
    return (output.argmax(1) == target).float().mean()
