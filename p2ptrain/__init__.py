"""p2ptrain: train one neural network together on the devices you already own.

The names below are loaded when first used, so that commands which need no torch start at once.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from p2ptrain import errors, events
from p2ptrain._version import __version__
from p2ptrain.errors import (
    CaptureError,
    DeviceLost,
    Error,
    OptionError,
    PeerError,
    PlanError,
    RunCancelled,
    ScriptError,
    TrainingError,
    UserError,
)

if TYPE_CHECKING:
    from p2ptrain.api.node import Node
    from p2ptrain.api.run import Run
    from p2ptrain.api.train import train
    from p2ptrain.job.asynchrony import AsyncOptions
    from p2ptrain.job.callbacks import EarlyStopping, SaveBest, StopTraining
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions
    from p2ptrain.manners.settings import Manners
    from p2ptrain.model.stage.optimizer_spec import (
        ASGD,
        SGD,
        Adadelta,
        Adafactor,
        Adagrad,
        Adam,
        Adamax,
        AdamW,
        Muon,
        NAdam,
        RAdam,
        RMSprop,
        Rprop,
    )
    from p2ptrain.plan.types.weight_versions import Weights

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "AsyncOptions",
    "CaptureError",
    "DeviceLost",
    "EarlyStopping",
    "Error",
    "Job",
    "Manners",
    "Muon",
    "NAdam",
    "Node",
    "OptionError",
    "PeerError",
    "PlanError",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Run",
    "RunCancelled",
    "SaveBest",
    "ScriptError",
    "StopTraining",
    "TrainOptions",
    "TrainingError",
    "UserError",
    "Weights",
    "__version__",
    "errors",
    "events",
    "train",
]

_HOME = {
    "Job": "p2ptrain.job.job",
    "TrainOptions": "p2ptrain.job.train_options",
    "AsyncOptions": "p2ptrain.job.asynchrony",
    "EarlyStopping": "p2ptrain.job.callbacks",
    "SaveBest": "p2ptrain.job.callbacks",
    "StopTraining": "p2ptrain.job.callbacks",
    "Manners": "p2ptrain.manners.settings",
    "Weights": "p2ptrain.plan.types.weight_versions",
    "Node": "p2ptrain.api.node",
    "Run": "p2ptrain.api.run",
    "train": "p2ptrain.api.train",
}

_RENAMED = {"Asynchrony": "AsyncOptions"}
"""Older names, which work for one more version."""

_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
)

_HOME |= dict.fromkeys(_OPTIMIZERS, "p2ptrain.model.stage.optimizer_spec")

_NOT_TAKEN = ("LBFGS", "SparseAdam")
"""torch.optim's others, which users look for here."""


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name in _NOT_TAKEN:
        raise AttributeError(f"p2ptrain has no optimizer {name}: it has {', '.join(_OPTIMIZERS)}")
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"p2ptrain.{name} is p2ptrain.{new} now", DeprecationWarning, stacklevel=2)
        name = new
    if name in ("hf", "lightning", "photos"):  # hf imports transformers
        return importlib.import_module(f"p2ptrain.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'p2ptrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Those too that are not loaded yet, for completion of names."""
    return sorted({*globals(), *__all__})
