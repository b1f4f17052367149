"""Callbacks of a job, and the two that most jobs want: `EarlyStopping` and `SaveBest`.

A callback is a function of an event, or an object with any of `on_start`, `on_step`, `on_eval` and
`on_end`. They run on the device with the data, in a thread of their own, one call at a time:

    on_start    the first plan of this process: training begins
    on_step     each step, once, in order; the next update counts when it has returned
    on_eval     each evaluation; the next mini-batch begins when it has returned
    on_end      `Done`, `Error`, or `Stopped` where the user has ended it; always the last

A `StateCallback` works with what has been trained so far: it evaluates it, or saves it.

    on_step(s)      the callback sets `wanted`, where it wants the state of step s
    on_state(...)   it is given that state, in the callbacks' thread
    step s + 1      begins when `on_state` has returned

Only after steps for which `stands_still_after` says so the next mini-batch waits for the callback,
so that what it is given is the state of that step and of no other.
"""

from __future__ import annotations

import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from p2ptrain import events
from p2ptrain.errors import OptionError
from p2ptrain.events import Done, Eval, Event, Plan, Step, Stopped
from p2ptrain.net.forms import By, Count

if TYPE_CHECKING:
    from torch import Tensor

HOOKS: Final[Mapping[str, tuple[type[Event], ...]]] = {
    "on_start": (Plan,),
    "on_step": (Step,),
    "on_eval": (Eval,),
    "on_end": (Done, events.Error, Stopped),
}
"""What an object may have, and the events that each is for."""


def _read_number(value: object) -> float:
    return float.fromhex(value if isinstance(value, str) else "?")


LOSS = "loss"
"""Of every evaluation, beside the job's metrics."""

Callback: TypeAlias = Callable[[Event], object] | object
"""A function of an event, or an object with any of the `HOOKS`."""

Mode: TypeAlias = Literal["min", "max"]


class StopTraining(Exception):  # as StopIteration: it is no error
    """Raise it in a callback: the job ends well, with the weights of that step."""


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """Of one metric.

    Attributes:
        best: None before the first evaluation.
        step: updates behind it.
        waited: evaluations since.
    """

    best: Annotated[float, By(_read_number, float.hex)] | None = None
    step: Count = 0
    waited: Count = 0


class BestValue:
    """The best value of one metric.

    Attributes:
        metric: its name in `Job.metrics`, or "loss".
        found: so far; a holder that is started again continues from there.
    """

    def __init__(self, metric: str, mode: Mode, min_delta: float) -> None:
        if not isinstance(metric, str):
            raise OptionError(f"metric must be the name of a metric, not {metric!r}")
        if mode not in ("min", "max"):
            raise OptionError(f"mode must be 'min' or 'max', not {mode!r}")
        is_number = isinstance(min_delta, int | float) and not isinstance(min_delta, bool)
        if not is_number or not 0 <= min_delta < math.inf:
            raise OptionError(f"min_delta must be a number of 0 or more, not {min_delta!r}")
        self.metric = metric
        self.found = BestSoFar()
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta

    @property
    def best(self) -> float | None:
        """The best value; None before the first evaluation."""
        return self.found.best

    @property
    def best_step(self) -> int:
        """Updates behind it."""
        return self.found.step

    @property
    def waited(self) -> int:
        """Evaluations since."""
        return self.found.waited

    def improves(self, event: Eval) -> bool | None:
        """Whether an evaluation is the best so far; None where it has no such metric (it failed).

        A value that is not a number is never better.
        """
        value = event.metrics.get(self.metric)
        if value is None:
            return None
        is_better = not math.isnan(value) and (
            self.best is None or self._sign * (value - self.best) > self._min_delta
        )
        if is_better:
            self.found = BestSoFar(float(value), event.step)
        else:
            self.found = replace(self.found, waited=self.waited + 1)
        return is_better


class EarlyStopping(BestValue):
    """Ends the training once a metric has not become better for `patience` evaluations in a row.

    Args:
        metric: a name in `Job.metrics`, or "loss" of `eval_data`.
        patience: evaluations without a better value.
        mode: whether a smaller value ("min") or a larger one ("max") is better.
        min_delta: by more than this a value has to be better.

    Attributes:
        stopped_step: updates after which it has ended the training; None where it has not.
    """

    def __init__(
        self,
        metric: str = LOSS,
        patience: int = 3,
        mode: Mode = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise OptionError(f"patience counts evaluations: give 1 or more, not {patience!r}")
        self.patience = patience
        self.stopped_step: int | None = None

    def on_eval(self, event: Eval) -> None:
        """Raises StopTraining: that is enough."""
        if self.improves(event) is not None and self.waited >= self.patience:
            self.stopped_step = event.step
            raise StopTraining(
                f"{self.metric} has not been better than {self.best} for {self.waited} evaluations"
            )


class SaveBest(BestValue):
    """Writes the weights to `path` after every evaluation in which a metric is the best so far.

    Args:
        metric: a name in `Job.metrics`, or "loss" of `eval_data`.
        path: safetensors file; replaced whole each time.
        mode: whether a smaller value ("min") or a larger one ("max") is better.
        min_delta: by more than this a value has to be better.
    """

    def __init__(
        self,
        metric: str,
        path: str | os.PathLike[str],
        mode: Mode = "min",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        try:
            self.path = Path(path)
        except TypeError:
            raise OptionError(f"path must be a file, not {path!r}") from None
        self._is_due = False

    def on_eval(self, event: Eval) -> None:
        """The weights are asked for where it is better."""
        self._is_due = bool(self.improves(event))

    def take_due(self) -> bool:
        """Whether the weights are to be written now; once."""
        due, self._is_due = self._is_due, False
        return due


def checked(callbacks: object, metrics: Iterable[str], *, evaluates: bool) -> tuple[Any, ...]:
    """The callbacks of a job.

    Args:
        metrics: names of the job's.
        evaluates: it has `eval_data`. A callback that evaluates by itself names its own metrics.

    Raises:
        OptionError: one cannot be called with an event, or waits for what never comes.
    """
    if callable(callbacks) or any(hasattr(callbacks, hook) for hook in HOOKS):
        raise OptionError("Job: callbacks is a list: write callbacks=[...]")
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        raise OptionError(f"Job: callbacks must be a list, not {type(callbacks).__name__}")
    made = tuple(callbacks)
    measures = any(getattr(one, "measures", False) for one in made)
    for number, callback in enumerate(made):
        _check(f"callbacks[{number}]", callback)
        if isinstance(callback, BestValue) and not measures:
            _check_metric(f"callbacks[{number}]", callback, set(metrics), evaluates)
    return made


def _check(name: str, callback: object) -> None:
    if isinstance(callback, type):
        raise OptionError(f"Job: {name} is the class {callback.__name__}: give an instance of it")
    hooks = [hook for hook in HOOKS if hasattr(callback, hook)]
    if not hooks and not callable(callback):
        raise OptionError(
            f"Job: {name} must be a function of an event, or have on_start, on_step, on_eval or "
            f"on_end: a {type(callback).__name__} has none of them"
        )
    calls = [(f"{name}.{hook}", getattr(callback, hook)) for hook in hooks]
    for shown, call in calls or [(name, callback)]:
        check_takes_event(f"Job: {shown}", call)


def check_takes_event(name: str, call: Any) -> None:
    """Raises OptionError: it cannot be called with one event, or has to be awaited."""
    if not callable(call):
        raise OptionError(f"{name} must be a function, not {type(call).__name__}")
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004  # of an object
    ):
        raise OptionError(
            f"{name} is an async function, but it is called and not awaited: give a plain "
            "one, which may take its time, or iterate over the events of the run"
        )
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # such as a function in C: nothing is known of it
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise OptionError(f"{name} is called with one event: {error}") from error


def _check_metric(name: str, callback: BestValue, metrics: set[str], evaluates: bool) -> None:
    shown = f"Job: {name} is a {type(callback).__name__} of {callback.metric!r}"
    if not evaluates:
        raise OptionError(f"{shown}, which is computed over eval_data: give eval_data too")
    if callback.metric not in metrics | {LOSS}:
        known = ", ".join(sorted(metrics | {LOSS}))
        raise OptionError(f"{shown}, but evaluations have {known}")


def calls(callback: Any, event: Event) -> Iterator[tuple[str, Callable[[Event], object]]]:
    """What of a callback an event is for, with its name."""
    shown = getattr(callback, "__qualname__", type(callback).__name__)
    if not any(hasattr(callback, hook) for hook in HOOKS):
        yield shown, callback
        return
    for hook, kinds in HOOKS.items():
        if isinstance(event, kinds) and hasattr(callback, hook):
            yield f"{shown}.{hook}", getattr(callback, hook)


class WantedState(Enum):
    """What a callback wants of the state."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    ALL = "all"
    """The optimizer's state too, which is more to bring here."""


@dataclass(frozen=True)
class TrainedState:
    """What has been trained.

    Attributes:
        step: updates behind it.
        weights: by the names of the user's state_dict.
        write_checkpoint: writes a checkpoint to a folder, for `TrainOptions.resume`;
            None where only the weights were wanted. Raises TrainingError: it cannot be written.
    """

    step: int
    weights: Mapping[str, Tensor]
    write_checkpoint: Callable[[Path], None] | None


class StateCallback(ABC):
    """A callback of rounds that is given the state; it has other hooks of a callback too.

    Attributes:
        wanted: what it wants next; the callback itself sets it, and takes it back in `on_state`,
            or wants more.
        measures: whether it evaluates by itself, and sets `measured`.
        measured: in `on_state`, what a ReduceLROnPlateau is stepped with.
        evaluated: in `on_state`, metrics that an eval event is to have; None: there is no event.
    """

    wanted: WantedState = WantedState.NOTHING
    measures: bool = False
    measured: float | None = None
    evaluated: Mapping[str, float] | None = None

    @abstractmethod
    def stands_still_after(self, step: int) -> bool:
        """Whether the next mini-batch begins only once this callback has done its work.

        Asked on the event loop, before `on_step`, perhaps more than once.
        """

    @abstractmethod
    def on_state(self, state: TrainedState) -> None:
        """Work with what was wanted. Raises StopTraining: the job ends well."""
