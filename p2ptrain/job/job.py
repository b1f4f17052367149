"""What a training script hands over: the Job, checked field by field when it is made.

A wrong field is found and named here, on the user's device, before any other device is asked for
anything.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.batch_parts import own_loss
from p2ptrain.job.callbacks import Callback
from p2ptrain.job.callbacks import checked as checked_callbacks
from p2ptrain.job.chosen_optimizer import Optimizer, check_optimizer
from p2ptrain.job.data_kinds import (
    check_data,
    check_fits,
    is_map_style,
    size_of_batches,
    updates_in,
)
from p2ptrain.job.given_weights import check_weights
from p2ptrain.job.update_numbers import Interval, UpdateNumbers, check_scheduler

Metric: TypeAlias = Callable[[Any, Any], Any]
"""(model output, target) of some samples -> a number or 0-dim tensor. Or an object with `update`,
`compute` and `reset`, as torchmetrics has them."""

LOSS = "loss"
"""What the loss over `eval_data` is called among metrics."""

AUTO = "auto"
"""A micro-batch that the planner chooses, whatever that changes."""

MicroBatch: TypeAlias = int | Literal["auto"] | None

_SEED_LIMIT = 2**63


@dataclass(frozen=True, eq=False)
class Job:
    """One model to train, how, and on what.

    Attributes:
        model: trained in place; in the end its weights are the trained ones.
        data: a dataset or an iterable one, whose samples make batches of `batch_size`, or a
            DataLoader, whose own batches are the mini-batches. A batch (x, y) is `model(x)` and
            `loss(output, y)`, with `model(*x)` for a tuple and `model(**x)` for a dict. A batch
            that is a dict is `model(**batch)`.
        loss: (model output, target) -> 0-dim tensor, a mean; traced with the model. Of batches
            that are dicts the target is the batch. None: the model computes it (`output.loss`,
            `output["loss"]`, else `output[0]`).
        optimizer: a torch.optim object over the model's parameters, which is read and never
            stepped; or `p2ptrain.SGD(...)`, `Adam(...)` and so on, over all of them.
        batch_size: samples of one update; of a DataLoader it is the loader's own.
        micro_batch: samples of one micro-batch. None leaves it to the planner where that changes no
            result, and else follows from the job alone; "auto" leaves it to the planner anyway.
        epochs: passes over the data.
        seed: of the order of samples, and of dropout.
        schedule: update (from 0) -> factor on the learning rates.
        scheduler: a torch.optim.lr_scheduler object over `optimizer`, stepped on this device after
            every update.
        scheduler_interval: "epoch": after every epoch instead.
        scheduler_metric: of the evaluations, what a ReduceLROnPlateau is stepped with.
        clip_grad_norm: largest 2-norm of all gradients together.
        normalizer: batch -> what it counts: what the loss's mean is taken over. None: the targets
            that torch's cross entropy does not ignore, or the sum of their classes' weights; else
            the samples.
        skip_nonfinite: leave out an update with something that is not finite, instead of ending
            the job: weights, running statistics and the optimizer's state stay as they were, and
            the update counts as one (for `steps`, epochs and the schedule).
        eval_data: like `data`; the metrics run over it after each epoch and at the end.
        metrics: by name.
        callbacks: functions of an event, or objects with any of `on_start`, `on_step`, `on_eval`
            and `on_end` (`p2ptrain.job.callbacks`). What one raises ends the job with that error;
            `p2ptrain.StopTraining` ends it well.
        autocast: torch.bfloat16 or float16 computes model and loss as under `torch.autocast`;
            parameters, gradients and updates stay as they are. In float16 losses are scaled, and
            updates skipped, as with `torch.amp.GradScaler()`.
        fast_math: accelerators may round what they multiply to 10 bits (TensorFloat-32), choose the
            fastest algorithms, and add in any order: results are not the same every time.
            Processors compute as ever.
        weights: a safetensors file, or a folder of them with its index, with which training begins:
            then the model may be on "meta".
        ema: decay of an average of the weights, which is kept beside them and written beside
            `--out`: ema * average + (1 - ema) * weight after every update, from the first on.
        eval_with_ema: evaluations, and `SaveBest`, take the average.

    Raises:
        OptionError: a number or the optimizer is unusable; the message names the field.
        ScriptError: the model, the loss, the data or a function is unusable.
    """

    def __new__(cls, *args: object, **given: object) -> Job:
        """Refuses what a Job does not have, in words that say where it belongs."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                public = tuple(n for n in cls.__dataclass_fields__ if not n.startswith("_"))
                raise OptionError(_no_such_field(name, public))
        return super().__new__(cls)

    model: torch.nn.Module
    data: Any
    loss: Callable[[Any, Any], torch.Tensor] | None
    optimizer: Optimizer
    batch_size: int = None  # type: ignore[assignment]  # a number once it is checked
    micro_batch: MicroBatch = None
    epochs: int = 1
    seed: int = 0
    schedule: Callable[[int], float] | None = None
    clip_grad_norm: float | None = None
    normalizer: Callable[[Any], Any] | None = None
    skip_nonfinite: bool = False
    eval_data: Any = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    autocast: torch.dtype | None = None
    weights: str | os.PathLike[str] | None = None
    ema: float | None = None
    eval_with_ema: bool = False
    scheduler: LRScheduler | None = None
    scheduler_interval: Interval = "update"
    scheduler_metric: str = "loss"
    fast_math: bool = False
    _numbers: UpdateNumbers | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_model(self.model)
        object.__setattr__(self, "weights", check_weights(self.model, self.weights))
        if self.loss is not None:
            _check_function("loss", self.loss)
        check_optimizer(self.model, self.optimizer, self.loss)
        check_data("data", self.data)
        self._check_sizes()
        self._check_extras()

    @property
    def numbers(self) -> UpdateNumbers:
        """The numbers of the optimizer's groups, update by update."""
        assert self._numbers is not None
        return self._numbers

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates of one epoch; of a dataset the last incomplete batch is dropped.

        None: it is known when the data has been gone through.
        """
        return updates_in(self.data, self.batch_size)

    @property
    def users_model(self) -> torch.nn.Module:
        """What the user knows as the model: of what is made of it for training, that."""
        users: torch.nn.Module = getattr(self.model, "users_own", self.model)
        return users

    @property
    def loss_function(self) -> Callable[[Any, Any], torch.Tensor]:
        """(model output, target) -> the loss, the model's own too."""
        return own_loss if self.loss is None else self.loss

    @property
    def fixed_micro_batch(self) -> int:
        """Samples of one micro-batch; 0 where the planner chooses."""
        return self.micro_batch if isinstance(self.micro_batch, int) else 0

    def total_steps(self, steps: int | None = None) -> int | None:
        """Updates of the whole job: the smaller of `steps` and what the epochs give.

        None: it is known when the data has been gone through.
        """
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            return None
        by_epochs = self.epochs * per_epoch
        return by_epochs if steps is None else min(steps, by_epochs)

    def _check_sizes(self) -> None:
        object.__setattr__(self, "batch_size", size_of_batches(self.data, self.batch_size))
        self._set_whole("epochs", self.epochs)
        if is_map_style(self.data):
            check_fits(len(self.data), self.batch_size)
        if self.micro_batch not in (None, AUTO):
            self._set_whole("micro_batch", self.micro_batch)
            if self.batch_size:
                size = min(self.fixed_micro_batch, self.batch_size)
                object.__setattr__(self, "micro_batch", size)
        self._set_whole("seed", self.seed, least=-_SEED_LIMIT)
        if self.seed + self.epochs >= _SEED_LIMIT:
            raise OptionError(f"Job: seed must be below 2**63 - epochs, not {self.seed}")

    def _check_extras(self) -> None:
        for switch in ("skip_nonfinite", "fast_math"):
            if not isinstance(getattr(self, switch), bool):
                given = getattr(self, switch)
                raise OptionError(f"Job: {switch} must be a bool, not {given!r}")
        self._check_scheduler()
        if self.normalizer is not None:
            _check_function("normalizer", self.normalizer)
        if self.clip_grad_norm is not None:
            _check_positive("clip_grad_norm", self.clip_grad_norm)
        if self.eval_data is not None:
            check_data("eval_data", self.eval_data)
        if not isinstance(self.metrics, Mapping):
            raise ScriptError("Job: metrics must be a dict of name -> function(output, target)")
        for name, metric in self.metrics.items():
            if not accumulates(metric):
                _check_function(f"metrics[{name!r}]", metric)
        if self.metrics and self.eval_data is None:
            raise ScriptError("Job: metrics are computed over eval_data: give eval_data too")
        evaluates = self.eval_data is not None
        callbacks = checked_callbacks(self.callbacks, self.metrics, evaluates=evaluates)
        object.__setattr__(self, "callbacks", callbacks)
        self._check_average()
        self._check_autocast()

    def _check_autocast(self) -> None:
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise OptionError(
                f"Job: autocast must be torch.bfloat16 or torch.float16, not {self.autocast!r}"
            )
        if self.autocast != torch.float16:
            return
        if self.skip_nonfinite:
            raise OptionError(
                "Job: with autocast=torch.float16 updates whose gradients are not finite are "
                "skipped anyway: leave out skip_nonfinite"
            )
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise OptionError(
                    f"Job: {name} is in float16, whose gradients cannot be scaled back: keep the "
                    "model in float32, autocast=torch.float16 computes in float16"
                )

    def _check_scheduler(self) -> None:
        if self.schedule is not None:
            _check_function("schedule", self.schedule)
        how = (self.schedule, self.scheduler_interval, self.scheduler_metric)
        check_scheduler(self.optimizer, self.scheduler, *how)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            measures = any(getattr(one, "measures", False) for one in self.callbacks)
            if self.eval_data is None and not measures:
                raise OptionError(
                    "Job: a ReduceLROnPlateau is stepped after evaluations: give eval_data too"
                )
            if not measures and self.scheduler_metric not in (LOSS, *self.metrics):
                raise OptionError(
                    f"Job: scheduler_metric={self.scheduler_metric!r} is none of the metrics: "
                    f"{', '.join([LOSS, *map(str, self.metrics)])}"
                )
        made_of = (self.optimizer, self.schedule, self.scheduler)
        if self._numbers is None or not self._numbers.is_of(*made_of):
            numbers = UpdateNumbers(*made_of, self.scheduler_interval)
            object.__setattr__(self, "_numbers", numbers)

    def _check_average(self) -> None:
        given = self.ema
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if given is not None and not (is_number and 0 <= given <= 1):
            raise OptionError(f"Job: ema must be from 0 to 1, such as 0.999, not {given!r}")
        if not isinstance(self.eval_with_ema, bool):
            raise OptionError(f"Job: eval_with_ema must be a bool, not {self.eval_with_ema!r}")
        if self.eval_with_ema and given is None:
            raise OptionError("Job: eval_with_ema needs an average of the weights: set ema=0.999")

    def _set_whole(self, name: str, value: object, least: int = 1) -> None:
        """Normalise integer-like values (numpy's, for one) to int."""
        try:
            whole = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            whole = None
        if whole is None or isinstance(value, bool):
            raise OptionError(f"Job: {name} must be a whole number, not {value!r}")
        if whole < least:
            raise OptionError(f"Job: {name} must be at least {least}, not {whole}")
        object.__setattr__(self, name, whole)


_CALLBACKS = "what is called with the events are `callbacks`"

_ELSEWHERE = {
    "shuffle": "samples of a dataset are shuffled in every epoch, by `seed`; a DataLoader has its"
    " own order",
    "lr": "it belongs to the optimizer: p2ptrain.SGD(lr=...)",
    "learning_rate": "it belongs to the optimizer: p2ptrain.SGD(lr=...)",
    "weight_decay": "it belongs to the optimizer: p2ptrain.AdamW(lr=..., weight_decay=...)",
    "momentum": "it belongs to the optimizer: p2ptrain.SGD(lr=..., momentum=...)",
    "gradient_accumulation_steps": "`batch_size` is the samples of one update, and `micro_batch` "
    "how many of them are computed at once",
    "accumulate_grad_batches": "`batch_size` is the samples of one update, and `micro_batch` how "
    "many of them are computed at once",
    "lr_scheduler": "a torch.optim.lr_scheduler object is `scheduler`, a function `schedule`",
    "on_event": _CALLBACKS,
    "callback": _CALLBACKS,
    "steps": "give it where the job is trained: `--steps S`, or TrainOptions(steps=...)",
    "max_steps": "give it where the job is trained: `--steps S`, or TrainOptions(steps=...)",
    "device": "every device computes where it can; the model stays on the CPU here",
    "num_workers": "it belongs to the loader: data=DataLoader(dataset, num_workers=...)",
    "sampler": "it belongs to the loader: data=DataLoader(dataset, sampler=...)",
    "drop_last": "it belongs to the loader: data=DataLoader(dataset, drop_last=...)",
    "collate_fn": "it belongs to the loader: data=DataLoader(dataset, batch_size=...,"
    " collate_fn=...)",
    "dataset": "the samples are `data`",
    "train_dataset": "the samples are `data`",
    "dataloader": "the loader is `data`",
    "train_dataloader": "the loader is `data`",
    "train_loader": "the loader is `data`",
    "eval_dataloader": "the loader to evaluate on is `eval_data`",
    "val_loader": "the loader to evaluate on is `eval_data`",
    "num_epochs": "the passes over the data are `epochs`",
    "num_train_epochs": "the passes over the data are `epochs`",
    "criterion": "the loss is `loss`",
    "loss_fn": "the loss is `loss`",
    "eval_dataset": "the samples to evaluate on are `eval_data`",
    "val_data": "the samples to evaluate on are `eval_data`",
    "validation_data": "the samples to evaluate on are `eval_data`",
    "max_grad_norm": "the largest norm of the gradients is `clip_grad_norm`",
    "gradient_clip_val": "the largest norm of the gradients is `clip_grad_norm`",
}
"""What others call what a Job has, or does by itself."""


def _no_such_field(name: str, fields: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, fields, 1)
    if name in _ELSEWHERE:
        advice = _ELSEWHERE[name]
    elif near:
        advice = f"did you mean {near[0]}?"
    else:
        advice = f"it has {', '.join(fields)}"
    return f"Job has no {name}: {advice}"


def accumulates(metric: object) -> bool:
    """Whether it is given piece after piece, and computed in the end."""
    if isinstance(metric, type):
        return False
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _check_model(model: object) -> None:
    if isinstance(model, type):
        raise ScriptError(f"Job: model is the class {model.__name__}; give an instance of it")
    if not isinstance(model, torch.nn.Module):
        raise ScriptError(f"Job: model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ScriptError("Job: model is a TorchScript module; give the nn.Module it was made from")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ScriptError(
            "Job: model has lazy layers that do not know their sizes yet; run it once on a sample "
            "before you hand it over"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ScriptError("Job: model has no parameter that requires a gradient")


def _check_function(name: str, value: object) -> None:
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        raise ScriptError(f"Job: {name} is the class {value.__name__}; give an instance of it")
    if not callable(value):
        raise ScriptError(f"Job: {name} must be a function, not {type(value).__name__}")


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and value > 0):  # type: ignore[operator]
        raise OptionError(f"Job: {name} must be a positive number, not {value!r}")
