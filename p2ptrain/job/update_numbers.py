"""The numbers of the optimizer's groups, update by update: rates, momenta, betas.

A `schedule` gives a factor on the learning rates. A `scheduler` is the user's own object of torch,
and is stepped here, on the holder: after every update, every epoch or, where it wants a metric,
every evaluation. What it has written into the groups after so many calls is what an update uses.

    calls     0     1     2     3 ...         update u uses what u calls have written; after an
    written   n0    n1    n2    n3            evaluation, what the metrics until then have

So the numbers of an update follow from its place and from the metrics alone. They are the same
after a device has died, when updates are computed again, and in a later process that resumes the
job: it steps the scheduler as often.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.chosen_optimizer import Optimizer, group_numbers
from p2ptrain.job.user_code import RAISED, describe_user_error, doings
from p2ptrain.logs import get_logger
from p2ptrain.model.stage.optimizer_form import (
    AS_GIVEN,
    PlainColumns,
    Value,
    columns_of,
    plain_value,
)
from p2ptrain.model.stage.optimizer_spec import (
    LARGEST,
    check_columns,
)

Interval: TypeAlias = Literal["update", "epoch"]

Measured: TypeAlias = tuple[tuple[int, float], ...]
"""(updates, metric) of every evaluation that a scheduler has seen."""

log = get_logger(__name__)

KEPT = 4096
"""Calls whose numbers are kept; for older ones the scheduler starts again from the beginning."""


def check_scheduler(
    optimizer: Optimizer, scheduler: object, schedule: object, interval: object, metric: object
) -> None:
    """Raises OptionError: it is none, or one of another optimizer."""
    if interval not in ("update", "epoch"):
        raise OptionError(f"Job: scheduler_interval must be 'update' or 'epoch', not {interval!r}")
    if not isinstance(metric, str):
        raise OptionError(f"Job: scheduler_metric is the name of a metric, not {metric!r}")
    if scheduler is None:
        return
    if not isinstance(scheduler, LRScheduler):
        raise OptionError(
            "Job: scheduler must be an object of torch.optim.lr_scheduler over the Job's "
            f"optimizer, as transformers.get_linear_schedule_with_warmup gives it, not "
            f"{type(scheduler).__name__}; a function of the update is `schedule`"
        )
    if schedule is not None:
        raise OptionError("Job: give `schedule` or `scheduler`, not both")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            "Job: a scheduler writes into an optimizer's groups: give the torch.optim object that "
            f"it was made with as `optimizer`, not p2ptrain.{getattr(optimizer, 'name', '')}"
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise OptionError(
            "Job: the scheduler is of another optimizer than the Job's: make it with the one that "
            "the Job gets"
        )


class UpdateNumbers:
    """See the module. Of one Job, as its optimizer and scheduler are when it is made.

    Attributes:
        groups: the numbers that training begins with.
        needs_metric: whether the scheduler is stepped after evaluations.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Callable[[int], float] | None,
        scheduler: LRScheduler | None,
        interval: Interval,
    ) -> None:
        self.groups = group_numbers(optimizer)
        self.needs_metric = isinstance(scheduler, ReduceLROnPlateau)
        self._name = (
            optimizer.name
            if not isinstance(optimizer, torch.optim.Optimizer)
            else (type(optimizer).__name__)
        )
        self._of = (optimizer, schedule, scheduler)
        self._schedule = schedule
        self._interval = interval
        self._run = None if scheduler is None else _SchedulerRun(scheduler)
        self._measured: list[tuple[int, float]] = []
        self._last: tuple[int, int] | None = None  # update and epoch that were asked for

    def is_of(self, *made_of: object) -> bool:
        """Whether it was made of that optimizer, schedule and scheduler."""
        return all(one is other for one, other in zip(self._of, made_of, strict=True))

    @property
    def facts(self) -> Any:
        """What distinguishes the scheduler from another one, as far as it is plain data."""
        return None if self._run is None else self._run.facts

    @property
    def measured(self) -> Measured:
        """What the scheduler has seen of evaluations."""
        return tuple(self._measured)

    def begin(self, measured: Measured) -> None:
        """A training begins, or continues from what an earlier one has seen."""
        self._measured = list(measured)
        if self._run is not None:
            self._run.start_again()

    def end(self) -> None:
        """All updates are made: the user's scheduler is stepped after the last one too."""
        if self._last is not None:
            try:
                self.changes(self._last[0] + 1, self._last[1])
            except ScriptError as error:  # what it gives is used by no update
                log.info("scheduler_not_stepped", why=str(error))

    def note(self, updates: int, metric: float) -> None:
        """An evaluation after so many updates gave that; the same again is none."""
        if all(updates > before for before, _ in self._measured):
            self._measured.append((updates, metric))

    def changes(self, update: int, epoch: int) -> PlainColumns:
        """What update `update`, from 0, in `epoch`, from 0, uses instead of `groups`.

        Raises:
            ScriptError: the user's function or scheduler fails, or gives what cannot be used.
        """
        if self._schedule is not None:
            factor = self._factor(self._schedule, update)
            rates = tuple(self._rate(group) * factor for group in self.groups)
            return AS_GIVEN if factor == 1.0 else self._checked({"lr": rates}, update)
        if self._run is None:
            return AS_GIVEN
        self._last = (update, epoch)
        arguments: Sequence[tuple[float, ...]]
        if self.needs_metric:
            arguments = [(metric,) for updates, metric in self._measured if updates <= update]
            calls = len(arguments)
        else:
            arguments, calls = (), update if self._interval == "update" else epoch
        written = self._run.after(calls, lambda call: arguments[call] if arguments else ())
        return self._checked(self._differing(written), update)

    def rates(self, changes: PlainColumns) -> tuple[float, ...]:
        """The learning rates of an update, one of each group."""
        column = changes.get("lr") or tuple(group["lr"] for group in self.groups)
        rates = tuple(float(value) for value in column if isinstance(value, (int, float)))
        return rates if len(rates) > 1 else rates * len(self.groups)

    def _rate(self, group: Mapping[str, Value]) -> float:
        rate = group["lr"]
        assert isinstance(rate, (int, float))
        return rate

    def _factor(self, schedule: Callable[[int], float], update: int) -> float:
        try:
            with doings.doing("schedule({})", update):
                factor = float(schedule(update))
        except RAISED as error:
            raise ScriptError(f"schedule({update}) failed: {describe_user_error(error)}") from error
        if not math.isfinite(factor):
            raise ScriptError(f"schedule({update}) gave {factor}, which is no learning-rate factor")
        rate = max(abs(self._rate(group)) for group in self.groups)
        if abs(factor * rate) > LARGEST:
            raise ScriptError(
                f"schedule({update}) gave {factor}: with lr={rate} that is a learning rate of more "
                f"than {LARGEST:.0e}"
            )
        return factor

    def _differing(self, written: Sequence[Mapping[str, Any]]) -> PlainColumns:
        """Of what the groups are now, the columns that are not `groups`'."""
        changed: list[dict[str, Value]] = []
        keys: set[str] = set()
        for number, (before, now) in enumerate(zip(self.groups, written, strict=True)):
            try:
                numbers = {key: plain_value(now.get(key, before[key])) for key in before}
            except ValueError as error:
                raise ScriptError(
                    f"the scheduler wrote something into group {number} that is no number "
                    f"({error}): its function must give floats, such as tensor.item()"
                ) from error
            changed.append(numbers)
            keys |= {key for key in before if numbers[key] != before[key]}
        if not keys:
            return AS_GIVEN
        return columns_of([{key: numbers[key] for key in sorted(keys)} for numbers in changed])

    def _checked(self, changes: PlainColumns, update: int) -> PlainColumns:
        try:
            check_columns(self._name, changes, len(self.groups))
        except OptionError as error:
            raise ScriptError(f"the scheduler, for step {update + 1}: {error}") from error
        for key, column in changes.items():
            usual = [group[key] for group in self.groups]
            if any(isinstance(value, (bool, str)) for value in column):
                raise ScriptError(f"the scheduler changes {key}, which is no number")
            begins = any(not before for before in usual) and any(column)
            if key == "momentum" and begins:
                raise ScriptError(
                    "the scheduler changes the momentum from 0, which changes what the optimizer "
                    f"keeps: give torch.optim.{self._name} a momentum from the beginning"
                )
        return changes


class _SchedulerRun:
    """The user's scheduler, stepped from its beginning as often as is asked for."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
        self._first = self._written()
        try:
            self._state: Any = copy.deepcopy(scheduler.state_dict())
        except RAISED as error:
            raise ScriptError(
                f"the scheduler's state cannot be read: {describe_user_error(error)}"
            ) from error
        self._kept: deque[list[dict[str, Any]]] = deque([self._first], KEPT)
        self._calls = 0  # made, since the beginning

    @property
    def facts(self) -> Any:
        """Its class, and what of its state is plain data."""
        return [type(self._scheduler).__name__, _plain(self._state)]

    def after(
        self, calls: int, argument_of: Callable[[int], tuple[float, ...]]
    ) -> list[dict[str, Any]]:
        """What the groups are after so many calls.

        Args:
            argument_of: a call's number, from 0 -> its arguments.

        Raises:
            ScriptError: the scheduler fails.
        """
        oldest = self._calls - len(self._kept) + 1
        if calls < oldest:
            self.start_again()
        while self._calls < calls:
            self._step(self._calls, argument_of(self._calls))
        return self._kept[calls - self._calls - 1]

    def _step(self, call: int, arguments: tuple[float, ...]) -> None:
        # torch warns where the optimizer was not stepped before; here it never is
        self._scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        stepped: Callable[..., None] = self._scheduler.step  # a ReduceLROnPlateau's takes a metric
        try:
            with doings.doing("scheduler.step() number {}", call + 1):
                stepped(*arguments)
        except RAISED as error:
            raise ScriptError(
                f"scheduler.step() number {call + 1} failed: {describe_user_error(error)}"
            ) from error
        self._calls += 1
        written = self._written()
        last = self._kept[-1]
        self._kept.append(last if written == last else written)

    def start_again(self) -> None:
        """From the beginning."""
        if not self._calls:
            return
        for group, first in zip(self._groups, self._first, strict=True):
            for key in set(group) - set(first) - {"params"}:
                del group[key]
            group.update(copy.deepcopy(first))
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        self._kept = deque([self._first], KEPT)
        self._calls = 0

    def _written(self) -> list[dict[str, Any]]:
        """All but the parameters: copies."""
        return [
            {key: copy.copy(value) for key, value in group.items() if key != "params"}
            for group in self._groups
        ]


def _plain(value: Any) -> Any:
    """What of it is plain data, for a comparison."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else ""
