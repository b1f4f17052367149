"""Curves of a run in TensorBoard, Weights & Biases, MLflow and Trackio, by their own libraries.

None is a dependency: the one that is asked for is imported then. Their offline modes are theirs
(`WANDB_MODE=offline`, a `file:` address in `MLFLOW_TRACKING_URI`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from p2ptrain import events
from p2ptrain.api.sinks.sink import Sink, scalars_of
from p2ptrain.errors import OptionError
from p2ptrain.events import Event

PROJECT = "p2ptrain"

FLUSH_SECONDS = 1


class TensorBoardSink:
    """Event files in a folder, by tensorboardX or, without it, torch.utils.tensorboard."""

    name = "--log-dir"
    goes_on = False

    def __init__(self, folder: Path) -> None:
        """Raises OptionError: neither library is installed."""
        self._folder = folder
        writers = {"tensorboardX": "tensorboardX", "tensorboard": "torch.utils.tensorboard"}
        found = [module for needed, module in writers.items() if _has(needed)]
        if not found:
            raise OptionError(
                "--log-dir needs a library that is not installed: "
                "pip install 'p2ptrain[tensorboard]'"
            )
        self._module = found[0]
        self._writer: Any = None

    def begin(self) -> None:
        """Open the file."""
        module = importlib.import_module(self._module)
        self._writer = module.SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)

    def take(self, event: Event) -> None:
        """Write its numbers; plans and what went wrong as texts."""
        found = scalars_of(event)
        if found is not None:
            for name, value in found.values.items():
                self._writer.add_scalar(name, value, found.step)
        elif isinstance(event, events.Plan):
            self._writer.add_text("plan", _plan_text(event), event.epoch)
        elif isinstance(event, events.Error):
            self._writer.add_text("error", event.message)

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbSink:
    """Weights & Biases, and Trackio, which has the same functions."""

    goes_on = False

    def __init__(self, module: str, config: Mapping[str, Any]) -> None:
        """Raises OptionError: it is not installed."""
        self.name = f"--report-to {module}"
        self._module = module
        self._config = config
        self._library: ModuleType | None = None
        _require(module)

    def begin(self) -> None:
        """Start a run."""
        self._library = importlib.import_module(self._module)
        self._library.init(project=PROJECT, config=dict(self._config))

    def take(self, event: Event) -> None:
        """Log its numbers."""
        found = scalars_of(event)
        if found is not None and self._library is not None:
            self._library.log(dict(found.values), step=found.step)

    def end(self) -> None:
        """Finish the run."""
        if self._library is not None:
            self._library.finish()


class MlflowSink:
    """MLflow."""

    name = "--report-to mlflow"
    goes_on = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises OptionError: it is not installed."""
        self._config = config
        self._library: ModuleType | None = None
        self._status = "FINISHED"
        _require("mlflow")

    def begin(self) -> None:
        """Start a run."""
        self._library = importlib.import_module("mlflow")
        self._library.set_experiment(PROJECT)
        self._library.start_run()
        self._library.log_params(dict(self._config))

    def take(self, event: Event) -> None:
        """Log its numbers."""
        if isinstance(event, events.Error):
            self._status = "FAILED"
        found = scalars_of(event)
        if found is not None and self._library is not None:
            values = {_as_file(name): value for name, value in found.values.items()}
            self._library.log_metrics(values, step=found.step)

    def end(self) -> None:
        """End the run."""
        if self._library is not None:
            self._library.end_run(self._status)


def _as_file(name: str) -> str:
    """In MLflow's files a metric is a file: `train/lr` cannot be a folder for `train/lr/0` too."""
    kind, slash, rest = name.partition("/")
    return f"{kind}{slash}{rest.replace('/', '.')}"


TRACKERS: Mapping[str, Callable[[Mapping[str, Any]], Sink]] = {
    "wandb": lambda config: WandbSink("wandb", config),
    "mlflow": MlflowSink,
    "trackio": lambda config: WandbSink("trackio", config),
}


def _plan_text(event: events.Plan) -> str:
    stages = [
        f"layers {stage.units[0]} to {stage.units[1] - 1}: "
        + ", ".join(device.name for device in stage.devices)
        for stage in event.stages
    ]
    return "; ".join([event.reason, *stages])


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _require(module: str) -> None:
    if not _has(module):
        raise OptionError(f"--report-to {module}: it is not installed: pip install {module}")
