"""A LightningModule's validation, by Lightning's own code on the device with the data.

It has the weights of the step after which it runs; the others stand still meanwhile. So everything
in `validation_step`, its hooks and metric objects is what it is with Lightning.
"""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from p2ptrain.errors import ScriptError
from p2ptrain.events import Event, Step
from p2ptrain.job.callbacks import BestValue, StateCallback, TrainedState, WantedState
from p2ptrain.lightning.training_step import LoggedNames, TrainingStep

_FIT_ONLY = ("setup", "teardown", "prepare_data", "configure_model")
"""Hooks that were called before training."""


_DATA = (Dataset, DataLoader)
"""What a module may hold that is not copied."""


@dataclass(eq=False)
class Validation(StateCallback):
    """Of one job.

    Attributes:
        module: the user's.
        base: Lightning's own LightningModule, which says which package it comes from.
        loaders: what is validated on.
        every: updates between two validations.
        updates: of one epoch.
        monitor: what a ReduceLROnPlateau is stepped with.
        watching: the job's callbacks that wait for what is logged.
        logged: what training_step logs.
        autocast: the type under which it is computed; None: as it is.
    """

    module: Any
    base: type
    loaders: Any
    every: int
    updates: int | None
    monitor: str | None
    watching: Sequence[BestValue]
    logged: LoggedNames
    autocast: torch.dtype | None

    measures = True
    _loss: float = field(default=0.0, init=False)
    # the household may go back to the weights that the user's own has
    _copy: Any = field(default=None, init=False)

    def stands_still_after(self, step: int) -> bool:
        """Where a validation is due."""
        return step % self.every == 0

    def on_step(self, event: Step) -> None:
        """Wants the weights where a validation is due."""
        self._loss = event.loss
        if self.stands_still_after(event.step):
            self.wanted = WantedState.WEIGHTS

    def on_state(self, state: TrainedState) -> None:
        """Validates."""
        self.wanted = WantedState.NOTHING
        if self._copy is None:
            self._copy = self._copied()
        self._copy.load_state_dict(state.weights, strict=False)
        found = dict.fromkeys(sorted(self.logged.losses), self._loss)
        self.evaluated = found = found | self._validate(state.step)
        for name in [one.metric for one in self.watching] + [self.monitor or ""]:
            if name and name not in found:
                raise ScriptError(
                    f"something waits for {name!r}, and what is logged is "
                    f"{', '.join(map(repr, found)) or 'nothing'}"
                )
        self.measured = found.get(self.monitor or "")

    def _copied(self) -> Any:
        held = (value for value in vars(self.module).values() if isinstance(value, _DATA))
        copied = copy.deepcopy(self.module, {id(one): one for one in held})
        for name in _FIT_ONLY:
            copied.__dict__[name] = _nothing
        return copied

    def _validate(self, step: int) -> dict[str, float]:
        trainer = self._trainer(step)
        kind, dtype = trainer.strategy.root_device.type, self.autocast
        # The Trainer's own "16-mixed" is bfloat16 on a processor.
        with _quiet(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            results = trainer.validate(self._copy, dataloaders=self.loaders, verbose=False)
        found: dict[str, float] = {}
        for logged in results:
            found |= {name: float(value) for name, value in logged.items()}
        return found

    def _trainer(self, step: int) -> Any:
        """Lightning's, as after so many updates."""
        package = self.base.__module__.partition(".core")[0]
        with _quiet():
            trainer = importlib.import_module(package).Trainer(
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        loop = trainer.fit_loop
        progress = loop.epoch_loop.automatic_optimization.optim_progress
        progress.optimizer.step.total.completed = step
        if self.updates:
            epoch = loop.epoch_progress.current
            epoch.processed = epoch.completed = (step - 1) // self.updates
        return trainer


def _nothing(*_: Any, **__: Any) -> None:
    """It was done before."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of each of its Trainers."""
    logs = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    before = [log.level for log in logs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for log in logs:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(logs, before, strict=True):
                log.setLevel(level)


class Ending:
    """Calls teardown where training ends, and says what of the logs is left out."""

    def __init__(self, step: TrainingStep, *torn_down: Any) -> None:
        self._step = step
        self._torn_down = torn_down

    def on_step(self, event: Step) -> None:
        """Warns, once."""
        logged = self._step.logged
        if event.step != 1:
            return
        for name, place in logged.places.items():
            if name not in logged.losses:
                warnings.warn(
                    f"training_step logs {name!r} ({place}), which is not its loss: of a training "
                    "step only the loss comes back from the devices. Log it in validation_step",
                    stacklevel=1,
                )

    def on_end(self, _: Event) -> None:
        """As Lightning after a fit."""
        for one in self._torn_down:
            if one is not None:
                one.teardown("fit")
