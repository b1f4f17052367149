"""BERT-small (4 layers, 512 wide, 28.8 M parameters) on sequences of 64 tokens.

p2ptrain train tools/bench/models/bert_small.py -o batch_size=64 --wait-for 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import p2ptrain
from tools.bench.models.common import CLASSES, LABELS, loss, repeated

__all__ = ["build", "data", "job", "loss"]


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
        **LABELS,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model.train()


def data(samples: int) -> TensorDataset:
    """Random sequences and classes, the same every time."""
    torch.manual_seed(1)
    inputs = torch.randint(30_522, (samples, 64))
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,)))


def job(batch_size: int = 64, adam: bool = False, evaluates: bool = False) -> p2ptrain.Job:
    """What `p2ptrain train` takes."""
    return repeated(build(), data, batch_size, adam=adam, evaluates=evaluates)
