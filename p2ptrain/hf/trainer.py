"""`p2ptrain.hf.Trainer`: transformers' Trainer, whose training a household does.

Optimizer, scheduler, order of samples, logs, evaluations and saved folders are made by
transformers' own code, which it inherits; the updates are a `p2ptrain.Job`.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint, has_length
from transformers.utils import logging

from p2ptrain import events
from p2ptrain.api.node import Node
from p2ptrain.api.train import train as train_job
from p2ptrain.errors import OptionError
from p2ptrain.events import Event
from p2ptrain.hf.arguments import check_arguments
from p2ptrain.hf.flow import TrainerFlow, check_callbacks, folder_of
from p2ptrain.hf.losses import (
    SmoothedLoss,
    UnshiftedCount,
    UsersLoss,
    counts_unshifted,
    is_causal,
    leaves_count,
    without_adapters,
    without_labels,
)
from p2ptrain.hf.sample_order import TrainingLength, length_of, mini_batches
from p2ptrain.job.callbacks import TrainedState
from p2ptrain.job.job import Job, MicroBatch
from p2ptrain.job.train_options import TrainOptions

logger = logging.get_logger(__name__)

NEVER_CALLED = (
    *("training_step", "compute_loss", "get_batch_samples", "_inner_training_loop"),
    *("_run_epoch", "_prepare_inputs", "autocast_smart_context_manager"),
)
"""Methods of transformers' Trainer that a subclass overrides in vain."""


class Trainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types
    """transformers' Trainer; see there for the arguments that are not here.

    Args:
        args: what of them cannot be done is refused by name.
        options: how the job is run: `TrainOptions(wait_for=3)`, `TrainOptions(local=True)`.
        node: arguments of `p2ptrain.Node`.
        micro_batch: as `Job.micro_batch`; None: the planner chooses where that changes no result.

    Raises:
        OptionError: names what cannot be done.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        options: TrainOptions | None = None,
        node: Mapping[str, Any] | None = None,
        micro_batch: MicroBatch = None,
    ) -> None:
        if model is None or model_init is not None:
            raise OptionError("p2ptrain.hf.Trainer trains a model that is there: give model=")
        args = args or TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        for method in NEVER_CALLED:
            if getattr(type(self), method) is not getattr(transformers.Trainer, method):
                raise OptionError(
                    f"{type(self).__name__}.{method} would never be called: devices train parts of "
                    "the model by themselves. A loss of your own is compute_loss_func=, or "
                    "p2ptrain.Job(loss=...)"
                )
        if args.lr_scheduler_type == "greedy":
            raise OptionError(
                "p2ptrain.hf.Trainer cannot do lr_scheduler_type=greedy: it is none of torch's"
            )
        inspect.signature(Node).bind(**(node or {}))
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        check_callbacks(self.callback_handler.callbacks)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # there is no torch.nn.DataParallel
        self._train_batch_size = args.per_device_train_batch_size
        self._options = options or TrainOptions()
        self._node = dict(node or {})
        self._on_event = self._node.pop("on_event", None)
        self._micro_batch = micro_batch
        self.state_being_saved: TrainedState | None = None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The household computes where it can; the user's model stays where it is."""

    # -- training --------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train with the household, or alone with `TrainOptions(local=True)`; blocks.

        Args:
            resume_from_checkpoint: a folder that this Trainer has saved, or True: the last one in
                `output_dir`.

        Raises:
            OptionError: names what cannot be done.
            UserError, PeerError: why the training failed.
        """
        if trial is not None:
            raise OptionError("p2ptrain.hf.Trainer searches no hyperparameters: train one by one")
        since = time.time()
        self.is_in_train = True
        try:
            folder = self._checkpoint(resume_from_checkpoint)
            if isinstance(self.processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
                self._align_special_tokens()
            data, length = self._data()
            self._begin(length, folder)
            self._warn_of_mean()
            flow = TrainerFlow(self, length, ignore_keys_for_eval, since)
            job = self._job(data, length, flow)
            options = self._options_of(length, folder)
            flow.begin()
            train_job(job, on_event=self._tell, options=options, **self._node)
            done: TrainOutput = self._finalize_training(None, self._seen(length), since)
            return done
        finally:
            self.is_in_train = False

    def _seen(self, length: TrainingLength) -> float:
        """Samples of the whole training, as transformers counts them."""
        if self.args.max_steps > 0 or length.samples is None:
            return float(length.steps * self.get_total_train_batch_size(self.args))
        return float(length.samples * self.args.num_train_epochs)

    def _checkpoint(self, asked: str | bool | None) -> str | None:
        if not asked:
            return None
        folder = get_last_checkpoint(self.args.output_dir) if asked is True else asked
        if folder is None:
            raise OptionError(f"there is no checkpoint in {self.args.output_dir}")
        if not folder_of(folder).is_dir():
            raise OptionError(
                f"{folder} has no optimizer state that p2ptrain reads (it is not a checkpoint of "
                "p2ptrain.hf.Trainer, or was saved with save_only_model): train on from its "
                "weights, with from_pretrained"
            )
        return str(folder)

    def _align_special_tokens(self) -> None:
        from transformers.trainer_utils import align_special_tokens

        if hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)

    def _begin(self, length: TrainingLength, folder: str | None) -> None:
        """As transformers begins; `folder`: what it continues from."""
        self._init_training_state(length.steps, length.updates, length.epochs, folder, None)
        if getattr(self, "_created_lr_scheduler", False):
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer_and_scheduler(num_training_steps=length.steps)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._tr_loss = torch.tensor(0.0, dtype=torch.float64)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self.state.global_step
        self.model.zero_grad()

    def _options_of(self, length: TrainingLength, folder: str | None) -> TrainOptions:
        options = self._options
        for name in ("steps", "resume"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"TrainOptions({name}=...) is the Trainer's: give max_steps, or "
                    "train(resume_from_checkpoint=...)"
                )
        resume = None if folder is None else folder_of(folder)
        return replace(options, steps=length.steps, resume=resume)

    def _job(self, data: Any, length: TrainingLength, flow: TrainerFlow) -> Job:
        args = self.args
        loss = self._loss()
        return Job(
            model=self.model,
            data=data,
            loss=loss,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            micro_batch=self._micro_batch,
            epochs=length.epochs,
            seed=args.seed,
            clip_grad_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
            normalizer=getattr(loss, "count", None),
            callbacks=[flow],
            autocast=_autocast(args),
        )

    def _warn_of_mean(self) -> None:
        """Of models for which transformers' own updates have larger gradients."""
        parts = self.args.gradient_accumulation_steps
        own = self.compute_loss_func is None and self.label_smoother is None
        if parts > 1 and own and self.model_accepts_loss_kwargs and leaves_count(self.model):
            logger.warning(
                f"transformers' Trainer adds up the means of the {parts} batches of an update for "
                f"{type(without_adapters(self.model)).__name__}, whose loss does not use "
                f"num_items_in_batch: its loss and gradients are {parts} times as large. Here they "
                "are the mean of the mini-batch, whatever divides it"
            )

    def _loss(self) -> SmoothedLoss | UnshiftedCount | UsersLoss | None:
        """None: the model computes it."""
        if self.compute_loss_func is not None:
            return UsersLoss(self.compute_loss_func)
        counts_first = self.model_accepts_loss_kwargs and counts_unshifted(self.model)
        if self.label_smoother is not None:
            shifts = is_causal(self.model)
            return SmoothedLoss(self.label_smoother, shifts=shifts, counts_first=counts_first)
        return UnshiftedCount() if counts_first else None

    def _tell(self, event: Event) -> None:
        if isinstance(event, events.Warning):
            logger.warning(event.message)
        if self._on_event is not None:
            self._on_event(event)

    # -- data ------------------------------------------------------------------------------------

    def _data(self) -> tuple[Any, TrainingLength]:
        """A loader of mini-batches, and how long that is."""
        if self.train_dataset is None:
            raise OptionError("Trainer: training requires a train_dataset")
        own = type(self).get_train_dataloader is not Trainer.get_train_dataloader
        loader = self.get_train_dataloader()
        if not own:
            dataset: Any = loader.dataset
            samples = len(dataset) if has_length(dataset) else None
        elif self.args.gradient_accumulation_steps > 1:
            raise OptionError(
                f"{type(self).__name__}.get_train_dataloader gives the mini-batches themselves: "
                "leave out gradient_accumulation_steps, and let it give larger ones"
            )
        else:
            batches = len(loader) if has_length(loader) else None
            samples = None if batches is None else batches * self.args.per_device_train_batch_size
        if samples is None and self.args.max_steps <= 0:
            raise OptionError("the data has no length: give max_steps")
        strategies = (self.args.eval_strategy, self.args.save_strategy, self.args.logging_strategy)
        if samples is None and "epoch" in strategies:
            raise OptionError("the data has no length: a strategy cannot be 'epoch', but 'steps'")
        return loader, length_of(self.args, samples)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The updates' mini-batches, in transformers' order."""
        dataset, collate = self._read(self.train_dataset)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            collate = without_labels(collate)
        sampler = None
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            sampler = self._get_train_sampler(dataset)
        return mini_batches(self.args, dataset, sampler, collate)

    def _read(self, dataset: Any) -> tuple[Any, Callable[..., Any]]:
        """Without what `forward` does not take."""
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            return self._remove_unused_columns(dataset, description="Training"), self.data_collator
        collate = self._get_collator_with_removed_columns(self.data_collator, "Training")
        return dataset, collate

    # -- logs, evaluations, folders --------------------------------------------------------------

    def count_flos(self, event: events.Step) -> None:
        """transformers' estimate for an update, where samples are sequences of token ids."""
        tokens = round((event.tokens_per_s or 0.0) * event.seconds)
        ids = {"input_ids": torch.empty(tokens, device="meta")}
        self.current_flos += float(self.floating_point_ops(ids))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """transformers', without an estimate that there is none of."""
        if logs.get("total_flos") == 0:
            del logs["total_flos"]
        super().log(logs, start_time)

    def log_progress(self, rate: float | None, norm: float | None, since: float) -> None:
        """The mean loss since the last time, and the last update's norm and learning rate."""
        steps = self.state.global_step - self._globalstep_last_logged
        if steps <= 0:
            return
        total = self._tr_loss.item()
        self._tr_loss -= self._tr_loss
        logs = {"loss": total / steps}
        if norm is not None:
            logs["grad_norm"] = norm
        if rate is not None:
            logs["learning_rate"] = rate
        self._total_loss_scalar += total
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()
        self.log(logs, since)

    def measured(self, metrics: Mapping[str, float]) -> float | None:
        """What a ReduceLROnPlateau is stepped with."""
        scheduler: object = self.lr_scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return None
        name = self.args.metric_for_best_model or "loss"
        return metrics[name if name.startswith("eval_") else f"eval_{name}"]

    def use_model(self, model: nn.Module) -> None:
        """Evaluate and save this one."""
        self.model = self.model_wrapped = self.callback_handler.model = model

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """transformers', on this device; the model comes back as it was."""
        self.accelerator.free_memory()
        model, device = self.model, _device_of(self.model)
        modes = [(module, module.training) for module in model.modules()]
        model.to(self.args.device)
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            model.to(device)
            for module, mode in modes:
                module.training = mode
        for name in [name for name in output.metrics if name.endswith("_model_preparation_time")]:
            del output.metrics[name]
        return output

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What training continues from, the scheduler's state included, is p2ptrain's own."""
        saved = self.state_being_saved
        if saved is not None and saved.write_checkpoint is not None:
            saved.write_checkpoint(folder_of(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        """Orders of samples and dropout follow from the seed and the step."""
        os.makedirs(output_dir, exist_ok=True)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise OptionError("p2ptrain.hf.Trainer searches no hyperparameters: train one by one")


def _autocast(args: TrainingArguments) -> torch.dtype | None:
    if args.fp16:
        return torch.float16
    return torch.bfloat16 if args.bf16 else None


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


assert set(NEVER_CALLED) <= {name for name, _ in inspect.getmembers(transformers.Trainer)}, (
    "this version of transformers has another Trainer"
)
__all__ = ["Dataset", "Trainer"]
