"""ResNet-50 (23.5 M parameters) on images of 64x64.

p2ptrain train tools/bench/models/resnet50.py -o batch_size=64 --wait-for 3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

import p2ptrain

CLASSES = 10
_LABELS: dict[str, Any] = {"num_labels": CLASSES}


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    config = ResNetConfig(
        depths=[3, 4, 6, 3],
        **_LABELS,
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    torch.manual_seed(1)
    inputs = torch.randn(samples, 3, 64, 64)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,)))


def loss(output: Any, target: Tensor) -> Tensor:
    """Of a transformers output; a mean over the samples."""
    return nn.functional.cross_entropy(output.logits, target)


def job(batch_size: int = 64) -> p2ptrain.Job:
    """Two mini-batches again and again: only the time counts, and the loss to compare."""
    return p2ptrain.Job(
        model=build(),
        data=data(2 * batch_size),
        loss=loss,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        epochs=1000,
    )
