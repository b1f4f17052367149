"""p2ptrain: train one neural network together on the devices you already own.

The names below are loaded when first used, so that commands which need no torch start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from p2ptrain._version import __version__
from p2ptrain.errors import Error, PeerError, UserError

if TYPE_CHECKING:
    from p2ptrain.api.node import Node
    from p2ptrain.api.run import Run
    from p2ptrain.api.train import train
    from p2ptrain.job.asynchrony import Asynchrony
    from p2ptrain.job.callbacks import EarlyStopping, SaveBest, StopTraining
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.model.stage.optimizer_spec import SGD, Adam, AdamW
    from p2ptrain.plan.types.weight_versions import Weights

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Asynchrony",
    "EarlyStopping",
    "Error",
    "Job",
    "Node",
    "PeerError",
    "Run",
    "SaveBest",
    "StopTraining",
    "TrainOptions",
    "UserError",
    "Weights",
    "__version__",
    "train",
]

_HOME = {
    "Job": "p2ptrain.job.job",
    "SGD": "p2ptrain.model.stage.optimizer_spec",
    "Adam": "p2ptrain.model.stage.optimizer_spec",
    "AdamW": "p2ptrain.model.stage.optimizer_spec",
    "TrainOptions": "p2ptrain.job.train_options",
    "Asynchrony": "p2ptrain.job.asynchrony",
    "EarlyStopping": "p2ptrain.job.callbacks",
    "SaveBest": "p2ptrain.job.callbacks",
    "StopTraining": "p2ptrain.job.callbacks",
    "Weights": "p2ptrain.plan.types.weight_versions",
    "Node": "p2ptrain.api.node",
    "Run": "p2ptrain.api.run",
    "train": "p2ptrain.api.train",
}

_OTHER_OPTIMIZERS = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adamax",
        "LBFGS",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseAdam",
    }
)
"""torch.optim's, which users look for here."""


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name in _OTHER_OPTIMIZERS:
        raise AttributeError(
            f"p2ptrain has no optimizer {name}: use p2ptrain.SGD, p2ptrain.Adam or p2ptrain.AdamW"
        )
    if name not in _HOME:
        raise AttributeError(f"module 'p2ptrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Those too that are not loaded yet, for completion of names."""
    return sorted({*globals(), *__all__})
