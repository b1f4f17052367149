"""EfficientNet-B1 (6.5 M parameters) on images of 32x32.

p2ptrain train tools/bench/models/efficientnet_b1.py -o batch_size=256 --wait-for 3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import EfficientNetConfig, EfficientNetForImageClassification

import p2ptrain

CLASSES = 10
_LABELS: dict[str, Any] = {"num_labels": CLASSES}


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    config = EfficientNetConfig(
        image_size=32,
        width_coefficient=1.0,
        depth_coefficient=1.1,
        hidden_dim=1280,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        **_LABELS,
    )
    model: nn.Module = EfficientNetForImageClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    torch.manual_seed(1)
    inputs = torch.randn(samples, 3, 32, 32)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,)))


def loss(output: Any, target: Tensor) -> Tensor:
    """Of a transformers output; a mean over the samples."""
    return nn.functional.cross_entropy(output.logits, target)


def job(batch_size: int = 256) -> p2ptrain.Job:
    """Two mini-batches again and again: only the time counts, and the loss to compare."""
    return p2ptrain.Job(
        model=build(),
        data=data(2 * batch_size),
        loss=loss,
        optimizer=p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        epochs=1000,
    )
