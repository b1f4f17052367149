"""What the models' scripts share: ten classes, random samples of them, and a job that repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import p2ptrain

CLASSES = 10
LABELS: dict[str, Any] = {"num_labels": CLASSES}
"""For a transformers configuration."""


def images(samples: int, side: int) -> TensorDataset:
    """Random square images and classes, the same every time."""
    torch.manual_seed(1)
    inputs = torch.randn(samples, 3, side, side)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,)))


def loss(output: Any, target: Tensor) -> Tensor:
    """Of a transformers output; a mean over the samples."""
    return nn.functional.cross_entropy(output.logits, target)


def repeated(
    model: nn.Module,
    data: Callable[[int], TensorDataset],
    batch_size: int,
    *,
    adam: bool = False,
    evaluates: bool = False,
) -> p2ptrain.Job:
    """Two mini-batches again and again: only the time counts, and the loss to compare.

    `evaluates`: as many samples after each epoch.
    """
    samples = data(2 * batch_size)
    return p2ptrain.Job(
        model=model,
        data=samples,
        loss=loss,
        optimizer=p2ptrain.Adam(lr=0.0001) if adam else p2ptrain.SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
        epochs=1000,
        eval_data=samples if evaluates else None,
        metrics={"loss": loss} if evaluates else {},
    )
