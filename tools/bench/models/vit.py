"""A ViT of 12 layers, 192 wide (5.4 M parameters), on images of 64x64 in patches of 8x8.

p2ptrain train tools/bench/models/vit.py -o batch_size=128 --wait-for 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import p2ptrain
from tools.bench.models.common import LABELS, images, loss, repeated

__all__ = ["build", "data", "job", "loss"]


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **LABELS,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random images and classes, the same every time."""
    return images(samples, 64)


def job(batch_size: int = 128, adam: bool = False, evaluates: bool = False) -> p2ptrain.Job:
    """What `p2ptrain train` takes."""
    return repeated(build(), data, batch_size, adam=adam, evaluates=evaluates)
