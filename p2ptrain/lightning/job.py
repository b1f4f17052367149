"""From a LightningModule and its data to a Job.

`configure_optimizers` may return any of

optimizer                                       [optimizer]
[optimizer], [scheduler]                        (the same as a tuple)
{"optimizer": ..., "lr_scheduler": scheduler, "monitor": ...}
{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "epoch", "frequency": 1,
                                    "monitor": ..., "strict": ..., "name": ...}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.callbacks import BestValue
from p2ptrain.job.job import Job
from p2ptrain.job.update_numbers import Interval
from p2ptrain.lightning.loaders import (
    FoundLoaders,
    TrainerFacts,
    UsersCount,
    attached,
    prepared_loaders,
)
from p2ptrain.lightning.refusals import (
    lightning_base,
    place_of,
    refuse_hooks,
    refuse_manual,
    refused,
)
from p2ptrain.lightning.training_step import LoggedNames, TrainingStep
from p2ptrain.lightning.validation import Ending, Validation

_SETTLED = {
    "model": "it is the module",
    "data": "it is the datamodule's, or the module's, train_dataloader",
    "loss": "it is what training_step returns",
    "optimizer": "it is what configure_optimizers returns",
    "scheduler": "it is what configure_optimizers returns",
    "scheduler_interval": "it is what configure_optimizers returns",
    "scheduler_metric": "it is what configure_optimizers returns as monitor",
    "schedule": "let configure_optimizers return a scheduler",
    "eval_data": "give val_dataloaders, or let the datamodule have val_dataloader",
    "metrics": "let validation_step log them",
    "batch_size": "the loader's own batches are the mini-batches",
    "eval_with_ema": "validation takes the weights",
}
"""Fields of a Job that follow from the module."""


def job(
    module: Any,
    datamodule: Any = None,
    *,
    val_dataloaders: Any = None,
    val_check_interval: int | None = None,
    epochs: int = 1,
    **fields: Any,
) -> Job:
    """A Job of a LightningModule whose `training_step` returns its loss.

        job = p2ptrain.lightning.job(module, datamodule, epochs=10, clip_grad_norm=1.0)
        p2ptrain.train(job, wait_for=3, code="12345678")

    The module is trained in place. What `validation_step` logs are the metrics of the eval events.

    Args:
        module: a LightningModule.
        datamodule: a LightningDataModule, or a loader to train on; None: the module has
            `train_dataloader`.
        val_dataloaders: to validate on; None: the datamodule or the module may have them.
        val_check_interval: updates between two validations; None: there is one after each epoch.
        epochs: passes over the data, Trainer's max_epochs.
        fields: other fields of `Job`: seed, micro_batch, clip_grad_norm (Trainer's
            gradient_clip_val), autocast, callbacks, ema and so on.

    Raises:
        ScriptError: the module cannot be taken; names the line.
        OptionError: a field that a Job does not have.
    """
    base = lightning_base(module, "LightningModule")
    if base is None:
        raise ScriptError(
            f"p2ptrain.lightning.job takes a LightningModule, not a {type(module).__name__}: any "
            "other module is a p2ptrain.Job's model"
        )
    for name in fields:
        if name in _SETTLED:
            raise OptionError(f"p2ptrain.lightning.job: leave out {name}: {_SETTLED[name]}")
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise OptionError(f"p2ptrain.lightning.job: epochs must be 1 or more, not {epochs!r}")
    refuse_hooks(module, base)
    is_module = lightning_base(datamodule, "LightningDataModule") is not None
    trainer = TrainerFacts(module, datamodule if is_module else None, epochs)
    found = prepared_loaders(module, datamodule, val_dataloaders, base, trainer)
    with attached(trainer, module):
        chosen = configured(module)
    refuse_manual(module)
    step = TrainingStep(module, trainer)
    module.zero_grad()
    callbacks = list(fields.pop("callbacks", ()))
    how = (step.logged, val_check_interval, callbacks, fields.get("autocast"))
    validating = _validating(module, base, found, chosen, *how)
    if callable(fields.get("normalizer")):
        fields["normalizer"] = UsersCount(fields["normalizer"])
    torn_down = [module, trainer.datamodule]
    return Job(
        model=step,
        data=found.train,
        loss=None,
        optimizer=chosen.optimizer,
        scheduler=chosen.scheduler,
        scheduler_interval=chosen.interval,
        epochs=epochs,
        callbacks=[*validating, *callbacks, Ending(step, *torn_down)],
        **fields,
    )


def _validating(
    module: Any,
    base: type,
    found: FoundLoaders,
    chosen: ConfiguredOptimizer,
    logged: LoggedNames,
    every: int | None,
    callbacks: Sequence[Any],
    autocast: torch.dtype | None,
) -> list[Validation]:
    watching = [one for one in callbacks if isinstance(one, BestValue)]
    if found.validation is None:
        waits = chosen.monitor if chosen.scheduler is not None else None
        if watching or waits:
            raise refused(
                module,
                f"something waits for {watching[0].metric if watching else waits!r}, and there is "
                "nothing to validate: give validation_step and a loader for it",
            )
        return []
    every = found.updates if every is None else every
    if every is None:
        raise OptionError(
            "p2ptrain.lightning.job: the data has no length: give val_check_interval, the updates "
            "between two validations"
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(
            f"p2ptrain.lightning.job: val_check_interval counts updates: 1 or more, not {every!r}"
        )
    return [
        Validation(
            *(module, base, found.validation, every, found.updates),
            *(chosen.monitor, watching, logged, autocast),
        )
    ]


_INTERVALS: Mapping[object, Interval] = {"step": "update", "epoch": "epoch"}

_KNOWN = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


@dataclass(frozen=True, slots=True)
class ConfiguredOptimizer:
    """What was configured.

    Attributes:
        monitor: what a ReduceLROnPlateau is stepped with: a name that validation logs.
    """

    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    interval: Interval = "epoch"
    monitor: str | None = None


def configured(module: Any) -> ConfiguredOptimizer:
    """Raises ScriptError: it is no form of one optimizer and at most one scheduler."""
    return _Reading(module).read(module.configure_optimizers())


class _Reading:
    def __init__(self, module: Any) -> None:
        self._module = module

    def read(self, given: Any) -> ConfiguredOptimizer:
        if isinstance(given, Optimizer):
            return ConfiguredOptimizer(given)
        if isinstance(given, Mapping):
            return self._of_dict(given)
        if isinstance(given, Sequence) and given and not isinstance(given, str):
            if len(given) == 2 and all(isinstance(part, list | tuple) for part in given):
                return self._of_lists(*given)
            self._one("optimizers", given)
            if isinstance(given[0], Optimizer | Mapping):
                return self.read(given[0])
        if given is None:
            raise self._refused("returns None: p2ptrain trains with an optimizer")
        raise self._refused(
            f"returns {_shown(given)}: return an optimizer of torch.optim, with its scheduler"
        )

    def _of_lists(
        self, optimizers: Sequence[Any], schedulers: Sequence[Any]
    ) -> ConfiguredOptimizer:
        self._one("optimizers", optimizers)
        if not optimizers or not isinstance(optimizers[0], Optimizer):
            raise self._refused(f"returns {_shown(optimizers)} as optimizers")
        if not schedulers:
            return ConfiguredOptimizer(optimizers[0])
        self._one("schedulers", schedulers)
        return self._with(optimizers[0], schedulers[0], None)

    def _of_dict(self, given: Mapping[str, Any]) -> ConfiguredOptimizer:
        extra = set(given) - {"optimizer", "lr_scheduler", "monitor"}
        optimizer = given.get("optimizer")
        if extra or not isinstance(optimizer, Optimizer):
            raise self._refused(
                f"returns a dict with {', '.join(map(repr, given))}: it may have 'optimizer', "
                "'lr_scheduler' and 'monitor'"
            )
        scheduler = given.get("lr_scheduler")
        if isinstance(scheduler, list | tuple):
            self._one("schedulers", scheduler)
            scheduler = scheduler[0] if scheduler else None
        return self._with(optimizer, scheduler, given.get("monitor"))

    def _with(self, optimizer: Optimizer, given: Any, monitor: str | None) -> ConfiguredOptimizer:
        if given is None:
            return ConfiguredOptimizer(optimizer)
        how = given if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
        if unknown := set(how) - set(_KNOWN):
            raise self._refused(f"gives lr_scheduler {', '.join(sorted(map(str, unknown)))}")
        scheduler = how.get("scheduler")
        if not isinstance(scheduler, LRScheduler):
            raise self._refused(
                f"gives {_shown(scheduler)} as lr_scheduler, which is none of torch"
            )
        interval = _INTERVALS.get(how.get("interval", "epoch"))
        if interval is None:
            raise self._refused(f"gives interval={how['interval']!r}: it is 'step' or 'epoch'")
        if (frequency := how.get("frequency", 1)) != 1:
            raise self._refused(
                f"gives frequency={frequency}: schedulers are stepped after every update or epoch"
            )
        monitor = how.get("monitor")
        if isinstance(scheduler, ReduceLROnPlateau) and not (monitor and interval == "epoch"):
            raise self._refused(
                "gives a ReduceLROnPlateau, which is stepped after each validation: give monitor, "
                "a name that validation_step logs, and interval 'epoch'"
            )
        return ConfiguredOptimizer(optimizer, scheduler, interval, monitor)

    def _one(self, what: str, given: Sequence[Any]) -> None:
        if len(given) > 1:
            raise self._refused(f"returns {len(given)} {what}: p2ptrain trains with one")

    def _refused(self, what: str) -> ScriptError:
        where = place_of(type(self._module).configure_optimizers)
        return refused(self._module, f"configure_optimizers ({where}) {what}")


def _shown(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, list | tuple) else f"a {kind}"
