"""BERT-small (4 layers, 512 wide, 28.8 M parameters) on sequences of 64 tokens.

p2ptrain train tools/bench/models/bert_small.py -o batch_size=64 --wait-for 3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import p2ptrain

CLASSES = 10
_LABELS: dict[str, Any] = {"num_labels": CLASSES}


def build() -> nn.Module:
    """Random weights, the same every time."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **_LABELS,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random sequences and classes, the same every time."""
    torch.manual_seed(1)
    inputs = torch.randint(30_522, (samples, 64))
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
