"""EfficientNet-B1 (6.5 M parameters) on images of 32x32.

p2ptrain train tools/bench/models/efficientnet_b1.py -o batch_size=256 --wait-for 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import EfficientNetConfig, EfficientNetForImageClassification

import p2ptrain
from tools.bench.models.common import LABELS, images, loss, repeated

__all__ = ["build", "data", "job", "loss"]


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
        **LABELS,
    )
    model: nn.Module = EfficientNetForImageClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    return images(samples, 32)


def job(batch_size: int = 256) -> p2ptrain.Job:
    """What `p2ptrain train` takes."""
    return repeated(build(), data, batch_size)
