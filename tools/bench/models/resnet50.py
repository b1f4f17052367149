"""ResNet-50 (23.5 M parameters) on images of 64x64.

p2ptrain train tools/bench/models/resnet50.py -o batch_size=64 --wait-for 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

import p2ptrain
from tools.bench.models.common import LABELS, images, loss, repeated

__all__ = ["build", "data", "job", "loss"]


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    config = ResNetConfig(
        depths=[3, 4, 6, 3],
        **LABELS,
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    return images(samples, 64)


def job(batch_size: int = 64) -> p2ptrain.Job:
    """What `p2ptrain train` takes."""
    return repeated(build(), data, batch_size)
