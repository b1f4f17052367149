"""The job that `tools/first_step.py` times: transformers' MobileNetV2 on 32x32 images."""

from __future__ import annotations

import torch
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

import p2ptrain

SAMPLES = 2048


def job(batch_size: int = 256) -> p2ptrain.Job:
    """Random weights, random images: only the time counts."""
    torch.manual_seed(0)
    config = MobileNetV2Config(num_labels=10, image_size=32)
    images = torch.randn(SAMPLES, 3, 32, 32)
    labels = torch.randint(10, (SAMPLES,))
    return p2ptrain.Job(
        model=MobileNetV2ForImageClassification(config),
        data=torch.utils.data.TensorDataset(images, labels),
        loss=lambda output, target: torch.nn.functional.cross_entropy(output.logits, target),
        optimizer=p2ptrain.SGD(lr=0.05, momentum=0.9),
        batch_size=batch_size,
        epochs=100,
    )
