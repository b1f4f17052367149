"""The models that are trained: one script each, which `p2ptrain train` takes as it is.

Every script has `build()`, `data(samples)`, `loss(output, target)` and `job(batch_size)`; the
rivals train what the first three give, so that all systems train the same weights on the same
samples. Dropout is off, because no two systems draw it alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import TensorDataset

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Training:
    """A model's script, loaded.

    Attributes:
        build: the model with the same random weights every time.
        data: (number of samples) -> inputs and targets, the same every time.
        loss: (model's output, targets) -> mean over the samples.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    loss: Callable[[object, Tensor], Tensor]


def script(name: str) -> Path:
    """What to give `p2ptrain train`."""
    return FOLDER / f"{name}.py"


def load(name: str) -> Training:
    """The functions of the model `name`'s script, without p2ptrain's part."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Training(module.build, module.data, module.loss)
