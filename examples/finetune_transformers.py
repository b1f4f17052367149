"""Finetunes a transformers model, unmodified: a small BERT that tells Python from English.

    p2ptrain train examples/finetune_transformers.py --local
    p2ptrain train examples/finetune_transformers.py --wait-for 3 -o folder=~/models/bert

The weights are random, so that nothing is downloaded, unless `-o folder=DIR` names a folder with
a pretrained BERT (config.json, model.safetensors and tokenizer files). The data are lines of
Python's own standard library: code, or text from docstrings and comments.
Needs transformers: pip install 'p2ptrain[examples]'

Measured on x86-64 with `--local --threads 1`: test accuracy 0.974 after 2 epochs, 48 s of one core.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import p2ptrain

LINES = 4000
TEST_LINES = 800
TOKENS = 48


def job(folder: Path | None = None, epochs: int = 2, lr: float = 3e-4) -> p2ptrain.Job:
    """`folder`: a pretrained BERT; `lr`: 3e-5 suits pretrained weights."""
    lines, labels = examples()
    tokens = bytes_as_tokens(lines) if folder is None else tokenized(folder, lines)
    train = TensorDataset(tokens[TEST_LINES:], labels[TEST_LINES:])
    test = TensorDataset(tokens[:TEST_LINES], labels[:TEST_LINES])
    torch.manual_seed(0)
    return p2ptrain.Job(
        model=Classifier(bert(folder)),
        data=train,
        loss=nn.functional.cross_entropy,
        optimizer=p2ptrain.AdamW(lr=lr),
        batch_size=64,
        epochs=epochs,
        clip_grad_norm=1.0,
        eval_data=test,
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
    )


class Classifier(nn.Module):
    """The model's logits alone: a Job's model gives what its loss takes."""

    def __init__(self, bert: BertForSequenceClassification) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, TOKENS) int64 -> (n, 2)."""
        return self.bert(input_ids=tokens).logits


def bert(folder: Path | None) -> BertForSequenceClassification:
    """A pretrained BERT, or a small one with random weights."""
    if folder is not None:
        return BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=256,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=TOKENS,
            num_labels=2,
        )
    )


def bytes_as_tokens(lines: list[str]) -> torch.Tensor:
    """(lines, TOKENS) int64: each byte is a token, zeros fill up."""
    rows = [line.encode()[:TOKENS].ljust(TOKENS, b"\0") for line in lines]
    return torch.tensor([list(row) for row in rows])


def tokenized(folder: Path, lines: list[str]) -> torch.Tensor:
    """(lines, TOKENS) int64, by the pretrained model's own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(
        lines, truncation=True, max_length=TOKENS, padding="max_length", return_tensors="pt"
    )["input_ids"]


def examples() -> tuple[list[str], torch.Tensor]:
    """Lines with their class, 0 for code and 1 for English, as many of each, shuffled."""
    code: list[str] = []
    english: list[str] = []
    for line in library_lines():
        (english if is_english(line) else code).append(line)
        if min(len(code), len(english)) >= LINES // 2:
            break
    pairs = [(line, 0) for line in code[: LINES // 2]]
    pairs += [(line, 1) for line in english[: LINES // 2]]
    random.Random(0).shuffle(pairs)
    return [line for line, _ in pairs], torch.tensor([label for _, label in pairs])


def library_lines() -> Iterator[str]:
    """Lines of the standard library that hold enough to judge by."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for line in file.read_text(encoding="utf-8", errors="ignore").splitlines():
            stripped = line.strip().lstrip("#").strip()
            if len(stripped) > 20 and '"""' not in stripped:
                yield stripped


def is_english(line: str) -> bool:
    """A sentence: words and ordinary punctuation only."""
    plain = sum(c.isalpha() or c in " ,.'" for c in line)
    return plain == len(line) and line.count(" ") >= 3
