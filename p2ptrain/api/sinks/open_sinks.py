"""The sinks that a run's options ask for, and what they all receive.

Curves go to TensorBoard, Weights & Biases, MLflow or Trackio, by their own libraries. None is a
dependency: the one that is asked for is imported then. Their offline modes are theirs
(`WANDB_MODE=offline`, a `file:` address in `MLFLOW_TRACKING_URI`).

`--notify` runs the user's command when a job ends or needs a person. The event is JSON on the
command's standard input, never a part of its words: no device's name and no error's text is read
by a shell, because there is none.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from p2ptrain import events
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.api.sinks.sink import Sink, SinkThread, scalars_of
from p2ptrain.errors import OptionError, TrainingError
from p2ptrain.events import Event

if TYPE_CHECKING:
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions

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


NEEDS_A_PERSON = frozenset({"waiting", "paused", "done", "error", "stopped"})
"""Kinds of events."""


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """Attributes:
    seconds: longest time that the command gets; then it is killed.
    """

    seconds: float = 20.0


class NotifySink:
    """One command, run once for each such event, one after the other."""

    name = "--notify"
    goes_on = True

    def __init__(self, command: str, settings: NotifySettings | None = None) -> None:
        """Raises OptionError: it is no command, or there is no such program."""
        self._settings = settings or NotifySettings()
        try:
            self._words = shlex.split(command, posix=os.name != "nt")
        except ValueError as error:
            raise OptionError(f"--notify {command!r}: {error}") from error
        if not self._words or shutil.which(self._words[0]) is None:
            raise OptionError(f"--notify {command!r}: there is no such program")

    def begin(self) -> None:
        """Nothing is run before the first event."""

    def take(self, event: Event) -> None:
        """Raises TrainingError: the command has failed."""
        if event.event not in NEEDS_A_PERSON:
            return
        text = json.dumps(event.to_json()) + "\n"
        try:
            done = subprocess.run(
                self._words,
                input=text,
                text=True,
                capture_output=True,
                timeout=self._settings.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"it took longer than {self._settings.seconds:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if not done.returncode:
                return
            last = (done.stderr.strip().splitlines() or [""])[-1][:200]
            why = f"exit code {done.returncode}{': ' if last else ''}{last}"
        raise TrainingError(f"{self._words[0]}: {why}")

    def end(self) -> None:
        """Every command has ended."""


def asked_sinks(job: Job, options: TrainOptions) -> list[Sink]:
    """Made, and not begun.

    Raises:
        OptionError: one is not known, not installed or no program.
    """
    sinks: list[Sink] = []
    if options.log_dir is not None:
        sinks.append(TensorBoardSink(options.log_dir))
    config = {
        "model": type(job.model).__name__,
        "batch_size": job.batch_size,
        "epochs": job.epochs,
        "seed": job.seed,
        "planner": options.planner,
    }
    for name in options.report_to:
        if name not in TRACKERS:
            raise OptionError(
                f"--report-to {name}: give one of {', '.join(TRACKERS)}; --log-dir DIR writes "
                "TensorBoard's files"
            )
        sinks.append(TRACKERS[name](config))
    if options.notify is not None:
        sinks.append(NotifySink(options.notify))
    return sinks


class RunSinks:
    """All of one run. On the event loop; `close` it."""

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[Event], None]) -> None:
        """`warn`: receives what goes wrong with one, as a warning."""
        self._threads = [SinkThread(sink) for sink in sinks]
        self._warn = warn

    def put(self, event: Event) -> None:
        """For all of them."""
        for thread in self._threads:
            thread.put(event)
        self._say_troubles()

    async def close(self) -> None:
        """Wait until they have taken all."""
        for thread in self._threads:
            await run_in_background(thread.close)
        self._say_troubles()

    def _say_troubles(self) -> None:
        for thread in self._threads:
            trouble = thread.trouble()
            if trouble is not None:
                self._warn(events.Warning(trouble))
