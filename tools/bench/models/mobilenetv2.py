"""MobileNetV2 (2.2 M parameters) on images of 32x32.

p2ptrain train tools/bench/models/mobilenetv2.py -o batch_size=1024 --wait-for 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

import p2ptrain
from tools.bench.models.common import LABELS, images, loss, repeated

__all__ = ["build", "data", "job", "loss"]


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    config = MobileNetV2Config(
        image_size=32,
        classifier_dropout_prob=0.0,
        **LABELS,
    )
    model: nn.Module = MobileNetV2ForImageClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    return images(samples, 32)


def job(batch_size: int = 1024, adam: bool = False, evaluates: bool = False) -> p2ptrain.Job:
    """What `p2ptrain train` takes."""
    return repeated(build(), data, batch_size, adam=adam, evaluates=evaluates)
