"""What of TrainingArguments is honoured, and that everything else is refused by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import TrainingArguments

from p2ptrain.errors import OptionError
from p2ptrain.hf.arguments import HARMLESS, HONOURED, WHY, check_arguments

FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="out", use_cpu=True, report_to=[], **changes)


def test_the_usual_arguments_are_taken() -> None:
    check_arguments(TrainingArguments(output_dir="out"))
    check_arguments(arguments(learning_rate=1e-3, bf16=True, label_smoothing_factor=0.1))
    check_arguments(arguments(fp16=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch_compile", True),
        *(("neftune_noise_alpha", 5.0), ("auto_find_batch_size", True), ("push_to_hub", True)),
        *(("include_num_input_tokens_seen", "all"), ("ignore_data_skip", True), ("optim", "lion")),
        *(("skip_memory_metrics", False), ("torch_empty_cache_steps", 5), ("use_cache", True)),
        *(("train_sampling_strategy", "batch_rebalance"), ("use_liger_kernel", True)),
        *(("ddp_find_unused_parameters", True), ("debug", "underflow_overflow")),
        *(("optim", "adafactor"), ("optim", "paged_adamw_8bit"), ("enable_jit_checkpoint", True)),
        ("accelerator_config", {"split_batches": True}),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, value: Any) -> None:
    try:
        args = arguments(**{name: value})
    except (ImportError, ValueError):  # transformers itself refuses it on this machine
        args = arguments()
        setattr(args, name, value)
    with pytest.raises(OptionError, match=name) as raised:
        check_arguments(args)
    assert WHY.get(name, name) in str(raised.value)


def test_every_one_that_cannot_be_done_is_named_at_once() -> None:
    args = arguments(neftune_noise_alpha=5)
    args.torch_compile = True
    with pytest.raises(OptionError, match=r"torch_compile=True .*neftune_noise_alpha=5") as raised:
        check_arguments(args)
    assert "learning_rate" not in str(raised.value)


def test_fields_of_a_subclass_are_refused_too() -> None:
    @dataclass
    class Seq2Seq(TrainingArguments):
        predict_with_generate: bool = False

    check_arguments(Seq2Seq(output_dir="out"))
    with pytest.raises(OptionError, match="predict_with_generate=True"):
        check_arguments(Seq2Seq(output_dir="out", predict_with_generate=True))


def test_the_lists_name_fields_that_there_are() -> None:
    assert HONOURED | HARMLESS | set(WHY) <= FIELDS
    assert not HONOURED & HARMLESS
    assert not set(WHY) & (HONOURED | HARMLESS)


def test_p2ptrain_does_not_import_transformers() -> None:
    code = (
        "import sys, p2ptrain\n"
        "p2ptrain.train, p2ptrain.Job\n"
        "sys.exit('transformers' in sys.modules or 'accelerate' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
