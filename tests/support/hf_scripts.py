"""Small versions of transformers' example scripts; everything is made here, from seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

SAMPLES = 22
"""Of training: no multiple of a batch."""

WORDS = ["good", "bad", "film", "play", "very", "not", "the", "a", "is", "was", "old", "new", "it"]


class Rows(Dataset[dict[str, Any]]):
    """Samples that are dicts."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


def tokenizer() -> PreTrainedTokenizerFast:
    """Of whole words, as BERT's."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )


def accuracy(prediction: Any) -> dict[str, float]:
    """As run_glue computes it."""
    found = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((found == prediction.label_ids).mean())}


def glue(lengths: bool = True) -> dict[str, Any]:
    """run_glue: sentences of many lengths, padded to the longest of a batch."""
    draw, tokens = np.random.default_rng(3), tokenizer()

    def rows(count: int) -> list[dict[str, Any]]:
        texts = [" ".join(draw.choice(WORDS, 3 + (i * 5) % 9 * lengths)) for i in range(count)]
        return [{**tokens(text), "label": i % 2, "idx": i} for i, text in enumerate(texts)]

    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return {
        "model": BertForSequenceClassification(config),
        "train_dataset": Rows(rows(SAMPLES)),
        "eval_dataset": Rows(rows(10)),
        "processing_class": tokens,
        "data_collator": DataCollatorWithPadding(tokens),
        "compute_metrics": accuracy,
    }


def clm() -> dict[str, Any]:
    """run_clm: blocks of tokens, some padded at the end, whose labels are ignored there."""
    draw = np.random.default_rng(4)

    def rows(count: int) -> list[dict[str, Any]]:
        made = []
        for i in range(count):
            ids = draw.integers(0, 40, 12)
            labels = ids.copy()
            labels[12 - (i * 7) % 6 :] = -100
            made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
        return made

    torch.manual_seed(6)
    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return {
        "model": GPT2LMHeadModel(config),
        "train_dataset": Rows(rows(SAMPLES)),
        "eval_dataset": Rows(rows(10)),
        "data_collator": default_data_collator,
    }


def images() -> dict[str, Any]:
    """run_image_classification."""
    draw = torch.Generator().manual_seed(7)

    def rows(count: int) -> list[dict[str, Any]]:
        return [
            {"pixel_values": torch.randn(3, 8, 8, generator=draw), "label": i % 3}
            for i in range(count)
        ]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }

    torch.manual_seed(8)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return {
        "model": ViTForImageClassification(config),
        "train_dataset": Rows(rows(SAMPLES)),
        "eval_dataset": Rows(rows(10)),
        "data_collator": collate,
        "compute_metrics": accuracy,
    }


SCRIPTS: dict[str, Callable[[], dict[str, Any]]] = {"glue": glue, "clm": clm, "images": images}


def arguments(folder: Path, **changes: Any) -> Any:
    """Of a short training."""
    from transformers import TrainingArguments

    how: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
        **changes,
    }
    return TrainingArguments(**how)
