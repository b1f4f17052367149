"""Which of transformers' TrainingArguments are honoured; all others are refused by name.

Every field is looked at, those too that a later version of transformers or a subclass adds: a field
that is not known here and is not as it is by default is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

from transformers import TrainingArguments
from transformers.utils import logging

from p2ptrain.errors import OptionError

logger = logging.get_logger(__name__)

HONOURED: Final = frozenset(
    {
        # the update
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"),
        *("num_train_epochs", "max_steps", "label_smoothing_factor", "seed"),
        *("bf16", "fp16", "data_seed"),
        # what is read
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        *("dataloader_in_order", "remove_unused_columns", "label_names"),
        *("train_sampling_strategy", "length_column_name"),
        # what is shown
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
        *("log_level", "disable_tqdm", "report_to", "run_name", "project"),
        # evaluations, by transformers' own code on this device
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "prediction_loss_only"),
        *("per_device_eval_batch_size", "eval_do_concat_batches", "eval_accumulation_steps"),
        *("include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval"),
        # what is kept
        *("output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "restore_callback_states_from_checkpoint",
    }
)

MEMORY: Final = frozenset(
    {"gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"}
)
"""They trade time for memory, which is planned here, and change no result."""

HARMLESS: Final = MEMORY | frozenset(
    {
        # what scripts read themselves
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
        # what only several processes of one Trainer would see: here there is one
        *("log_level_replica", "log_on_each_node", "save_on_each_node", "eval_use_gather_object"),
        *("ddp_timeout", "average_tokens_across_devices"),
        # where tensors lie, which `join --device` says here
        *("use_cpu", "dataloader_pin_memory"),
        # without push_to_hub, which is refused
        *("hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "hub_always_push"),
        "hub_revision",
        # training together always is
        "full_determinism",
    }
)
"""They change no result."""

WHY: Final[Mapping[str, str]] = {
    "tf32": "every device computes in the type that the weights have",
    "auto_find_batch_size": "the planner chooses micro-batches that fit; leave it out",
    "torch_compile": "models are captured by torch.export",
    "use_liger_kernel": "models are captured as operators of torch",
    "neftune_noise_alpha": "the noise is drawn by a hook, which no other device would run",
    "push_to_hub": "push the folder that save_model() writes",
    "include_num_input_tokens_seen": "tokens are not counted while training",
    "ignore_data_skip": "training continues exactly where it was",
    "skip_memory_metrics": "memory is planned: see the plan event's predicted_peak_bytes",
    "use_cache": "a training step has no use for a cache of keys and values",
    "deepspeed": "the household divides the model itself",
    "fsdp": "the household divides the model itself",
    "parallelism_config": "the household divides the model itself",
}
"""Of what people often set, the reason and what to do."""

SAMPLING: Final = ("random", "sequential", "group_by_length")

OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Those of `optim` that are classes of torch.optim."""


def check_arguments(args: TrainingArguments) -> None:
    """Warns of what has no effect. Raises OptionError: names every argument that cannot be done."""
    problems = [*_unknown(args), *_values(args)]
    if problems:
        raise OptionError(f"p2ptrain.hf.Trainer cannot do what is asked: {'; '.join(problems)}")
    for name in sorted(MEMORY):
        if getattr(args, name, None) is True:
            logger.warning(
                f"{name}=True has no effect: devices get stages whose activations fit their memory"
            )


def _unknown(args: TrainingArguments) -> Iterator[str]:
    usual = TrainingArguments(output_dir=args.output_dir)
    for field in dataclasses.fields(args):
        name = field.name
        if name in HONOURED or name in HARMLESS:
            continue
        value, default = getattr(args, name), getattr(usual, name, _default_of(field))
        if not _same(value, default):
            reason = f" ({WHY[name]})" if name in WHY else ""
            yield f"{name}={_shown(value)}{reason}"


def _default_of(field: dataclasses.Field[Any]) -> object:
    """Of a field that only a subclass has."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _values(args: TrainingArguments) -> Iterator[str]:
    """Arguments that are known, with values that cannot be done."""
    optim = _shown(args.optim)
    if optim not in OPTIMIZERS:
        yield (
            f"optim={optim} (it is none of torch.optim: use one of {', '.join(OPTIMIZERS)}, or "
            "give optimizers=(a torch.optim object, None))"
        )
    if args.train_sampling_strategy not in SAMPLING:
        known = ", ".join(SAMPLING)
        yield f"train_sampling_strategy={args.train_sampling_strategy} (use one of {known})"


def _same(value: object, default: object) -> bool:
    """Compared as they are written: an accelerator's configuration has no equality."""
    return type(value) is type(default) and (value == default or repr(value) == repr(default))


def _shown(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)
