"""From a LightningModule and its data to a Job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.callbacks import BestValue
from p2ptrain.job.job import Job
from p2ptrain.lightning.loaders import FoundLoaders, UsersCount, prepared_loaders
from p2ptrain.lightning.optimizers import ConfiguredOptimizer, configured
from p2ptrain.lightning.refusals import lightning_base, refuse_hooks, refuse_manual, refused
from p2ptrain.lightning.trainer_facts import TrainerFacts, attached
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
