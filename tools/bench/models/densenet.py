"""One dense block of 12 layers (0.8 M parameters) on images of 64x64, for `tools/memory.py`.

Huang et al. 2017, "Densely Connected Convolutional Networks": each layer reads all maps before it,
concatenated. Its maps are large up to the end and no two are of one size, which is where the C
library's heap has most holes.

p2ptrain train tools/bench/models/densenet.py -o batch_size=64
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import p2ptrain
from tools.bench.models.common import CLASSES, images

__all__ = ["build", "data", "job", "loss"]

GROWTH = 32
LAYERS = 12


class _Layer(nn.Module):
    """All maps so far in, GROWTH new ones out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * GROWTH, 1, bias=False)
        )
        self.new = nn.Sequential(
            nn.BatchNorm2d(4 * GROWTH),
            nn.ReLU(),
            nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        made: Tensor = self.new(self.narrow(torch.cat(maps, 1)))
        return made


class _DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, last = 2 * GROWTH, (2 + LAYERS) * GROWTH
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 2, 3, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.layers = nn.ModuleList(_Layer(first + k * GROWTH) for k in range(LAYERS))
        self.norm = nn.BatchNorm2d(last)
        self.classify = nn.Linear(last, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        maps = [self.stem(image)]
        for layer in self.layers:
            maps.append(layer(maps))
        read = torch.relu(self.norm(torch.cat(maps, 1)))
        classes: Tensor = self.classify(read.mean((2, 3)))
        return classes


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    return _DenseNet().train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    return images(samples, 64)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the samples."""
    return nn.functional.cross_entropy(output, target)


def job(batch_size: int = 64) -> p2ptrain.Job:
    """What `p2ptrain train` takes."""
    return p2ptrain.Job(
        model=build(),
        data=data(2 * batch_size),
        loss=loss,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        epochs=1000,
    )
