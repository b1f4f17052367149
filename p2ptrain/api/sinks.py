"""Where the events of a run go besides its readers: log files, trackers, a command.

    start_run --event--> queue of each sink --> its thread --> a file, a tracker, a command

Each has a thread of its own: none slows training down. One that fails ends, with a warning, and
training continues. Where a queue is full its oldest events are missed.

Curves go to TensorBoard, Weights & Biases, MLflow or Trackio, by their own libraries. None is a
dependency: the one that is asked for is imported then. Their offline modes are theirs
(`WANDB_MODE=offline`, a `file:` address in `MLFLOW_TRACKING_URI`).

`--notify` runs the user's command when a job ends or needs a person. The event is JSON on the
command's standard input: no device's name and no error's text is read by a shell.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain import events
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.errors import OptionError, TrainingError
from p2ptrain.events import Eval, Event, Step

if TYPE_CHECKING:
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions

PROJECT = "p2ptrain"

FLUSH_SECONDS = 1

MOST_WAITING = 10_000
"""Events of one sink."""

END_SECONDS = 30.0
"""For what still waits when the run ends."""

COMMAND_SECONDS = 20.0
"""Longest time that a command gets; then it is killed."""

TRACKERS = ("wandb", "mlflow", "trackio")

NEEDS_A_PERSON = frozenset({"waiting", "paused", "done", "error", "stopped"})
"""Kinds of events."""


class Sink:
    """Called in one thread, the same for all calls.

    Attributes:
        name: in words for the user, such as "--log-dir".
        goes_on: it gets further events after one that it has failed with.
    """

    name: str
    goes_on = False

    def begin(self) -> None:
        """Before the first event."""

    def take(self, event: Event) -> None:
        """What has happened, in order."""

    def end(self) -> None:
        """Nothing more comes."""


def numbers_of(event: Event) -> dict[str, float]:
    """What curves are drawn of, by name; empty where an event has no numbers."""
    if isinstance(event, Eval):
        return {f"eval/{name}": value for name, value in event.metrics.items()}
    if not isinstance(event, Step):
        return {}
    found = {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/samples_per_s": event.samples_per_s,
        "train/tokens_per_s": event.tokens_per_s,
        "train/seconds": event.seconds,
        "train/grad_norm": event.grad_norm,
    }
    if len(event.lrs) > 1:
        found |= {f"train/lr/{group}": rate for group, rate in enumerate(event.lrs)}
    return {name: value for name, value in found.items() if value is not None}


class TensorBoardSink(Sink):
    """Event files in a folder, by tensorboardX or, without it, torch.utils.tensorboard."""

    name = "--log-dir"

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
        if isinstance(event, Step | Eval):
            for name, value in numbers_of(event).items():
                self._writer.add_scalar(name, value, event.step)
        elif isinstance(event, events.Plan):
            self._writer.add_text("plan", _plan_text(event), event.epoch)
        elif isinstance(event, events.Error):
            self._writer.add_text("error", event.message)

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


def _plan_text(event: events.Plan) -> str:
    stages = [
        f"layers {stage.units[0]} to {stage.units[1] - 1}: "
        + ", ".join(device.name for device in stage.devices)
        for stage in event.stages
    ]
    return "; ".join([event.reason, *stages])


class TrackerSink(Sink):
    """Weights & Biases, Trackio, which has the same functions, or MLflow."""

    def __init__(self, tracker: str, config: Mapping[str, Any]) -> None:
        """One of `TRACKERS`. Raises OptionError: it is not installed."""
        self.name = f"--report-to {tracker}"
        if not _has(tracker):
            raise OptionError(f"{self.name}: it is not installed: pip install {tracker}")
        self._tracker = tracker
        self._config = dict(config)
        self._library: Any = None
        self._status = "FINISHED"

    @property
    def _is_mlflow(self) -> bool:
        return self._tracker == "mlflow"

    def begin(self) -> None:
        """Start a run."""
        self._library = importlib.import_module(self._tracker)
        if self._is_mlflow:
            self._library.set_experiment(PROJECT)
            self._library.start_run()
            self._library.log_params(self._config)
        else:
            self._library.init(project=PROJECT, config=self._config)

    def take(self, event: Event) -> None:
        """Log its numbers."""
        if isinstance(event, events.Error):
            self._status = "FAILED"
        if isinstance(event, Step | Eval):
            numbers = numbers_of(event)
            if self._is_mlflow:
                files = {_as_file(name): value for name, value in numbers.items()}
                self._library.log_metrics(files, step=event.step)
            else:
                self._library.log(numbers, step=event.step)

    def end(self) -> None:
        """End the run."""
        if self._is_mlflow:
            self._library.end_run(self._status)
        else:
            self._library.finish()


def _as_file(name: str) -> str:
    """In MLflow's files a metric is a file: `train/lr` cannot be a folder for `train/lr/0` too."""
    kind, slash, rest = name.partition("/")
    return f"{kind}{slash}{rest.replace('/', '.')}"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class NotifySink(Sink):
    """One command, run once for each event that needs a person, one after the other."""

    name = "--notify"
    goes_on = True

    def __init__(self, command: str, seconds: float = COMMAND_SECONDS) -> None:
        """Raises OptionError: it is no command, or there is no such program."""
        self._words, self._seconds = command_words(command), seconds

    def take(self, event: Event) -> None:
        """Raises TrainingError: the command has failed."""
        if event.event not in NEEDS_A_PERSON:
            return
        try:
            done = subprocess.run(
                self._words,
                input=json.dumps(event.to_json()) + "\n",
                text=True,
                capture_output=True,
                timeout=self._seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"it took longer than {self._seconds:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if not done.returncode:
                return
            last = (done.stderr.strip().splitlines() or [""])[-1][:200]
            why = f"exit code {done.returncode}{': ' if last else ''}{last}"
        raise TrainingError(f"{self._words[0]}: {why}")


def command_words(command: str) -> list[str]:
    """Raises OptionError: it is no command, or there is no such program."""
    try:
        words = shlex.split(command, posix=os.name != "nt")
    except ValueError as error:
        raise OptionError(f"--notify {command!r}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise OptionError(f"--notify {command!r}: there is no such program")
    return words


def check_trackers(names: Iterable[str]) -> None:
    """Raises OptionError: one is not known."""
    for name in names:
        if name not in TRACKERS:
            raise OptionError(
                f"--report-to {name}: give one of {', '.join(TRACKERS)}; --log-dir DIR writes "
                "TensorBoard's files"
            )


def asked_sinks(job: Job, options: TrainOptions) -> list[Sink]:
    """Made, and not begun.

    Raises:
        OptionError: one is not known, not installed or no program.
    """
    check_trackers(options.report_to)
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
    sinks += [TrackerSink(name, config) for name in options.report_to]
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


class SinkThread:
    """One sink's thread and queue. `put` never waits; call it from one thread."""

    def __init__(
        self, sink: Sink, most_waiting: int = MOST_WAITING, end_seconds: float = END_SECONDS
    ) -> None:
        self._sink = sink
        self._most_waiting, self._end_seconds = most_waiting, end_seconds
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._missed = 0
        self._trouble: str | None = None  # not said yet
        self._has_failed = False
        name = f"p2ptrain-{sink.name.strip('-')}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event."""
        with self._changed:
            if self._has_failed:
                return
            if len(self._waiting) == self._most_waiting:
                self._waiting.popleft()
                self._missed += 1
            self._waiting.append(event)
            self._changed.notify()

    def trouble(self) -> str | None:
        """A sentence about what went wrong, once."""
        with self._changed:
            said, self._trouble = self._trouble, None
            return said

    def close(self) -> None:
        """Let it take what waits, for so long at most; blocks."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(self._end_seconds)
        with self._changed:
            if self._thread.is_alive():
                self._trouble = f"{self._sink.name} was not done in time: its last events are lost"
            elif self._missed and not self._has_failed:
                missed = f"has missed {self._missed} events"
                self._trouble = f"{self._sink.name} was too slow and {missed}"

    def _run(self) -> None:
        try:
            self._sink.begin()
            while (event := self._next()) is not None:
                self._take(event)
            self._sink.end()
        except Exception as error:  # of a library, a disk, a network: said, and training continues
            with self._changed:
                self._has_failed = True
                self._waiting.clear()
                self._trouble = f"{self._sink.name} has failed and gets no more: {_why(error)}"

    def _take(self, event: Event) -> None:
        try:
            self._sink.take(event)
        except Exception as error:
            if not self._sink.goes_on:
                raise
            with self._changed:
                self._trouble = f"{self._sink.name}: {_why(error)}"

    def _next(self) -> Event | None:
        with self._changed:
            while not self._waiting and not self._is_over:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
