"""The mini-batches are the samples that transformers' Trainer takes for each update, in order."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from p2ptrain.hf.sample_order import length_of
from p2ptrain.hf.trainer import Trainer
from tests.support.hf_scripts import SAMPLES, Rows, arguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return (self.linear(input_ids.float()) - labels).mean(), labels


def rows() -> Rows:
    return Rows(
        [{"input_ids": [i] * (1 + i % 5), "labels": [i] * (1 + i % 5)} for i in range(SAMPLES)]
    )


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"labels": torch.tensor([sample["labels"][0] for sample in samples])}


def updates_of_transformers(args: Any, epochs: int) -> list[list[list[int]]]:
    trainer = transformers.Trainer(Model(), args, collate, rows())
    loader, found = trainer.get_train_dataloader(), []
    for epoch in range(epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = [batch["labels"].tolist() for batch in loader]
        every = args.gradient_accumulation_steps
        found.append([[*chain(*batches[i : i + every])] for i in range(0, len(batches), every)])
    return found


def updates_here(args: Any, epochs: int) -> list[list[list[int]]]:
    loader, found = Trainer(Model(), args, collate, rows()).get_train_dataloader(), []
    for epoch in range(epochs):
        torch.manual_seed(args.seed + epoch)  # as p2ptrain does
        found.append([batch["labels"].tolist() for batch in loader])
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data_seed": 3},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 4, "dataloader_drop_last": True},
        {"train_sampling_strategy": "sequential"},
        {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
    ],
)
def test_the_order_is_that_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    args = arguments(tmp_path, **changes)
    assert updates_here(args, 3) == updates_of_transformers(args, 3)


def test_epochs_are_known_from_the_seed_alone(tmp_path: Path) -> None:
    """A job that goes on reads no epoch before."""
    args = arguments(tmp_path)
    loader = Trainer(Model(), args, collate, rows()).get_train_dataloader()
    torch.manual_seed(args.seed + 2)
    third = [batch["labels"].tolist() for batch in loader]
    assert third == updates_of_transformers(args, 3)[2]


def test_samples_are_grouped_by_length(tmp_path: Path) -> None:
    args = arguments(tmp_path, train_sampling_strategy="group_by_length")
    (epoch,) = updates_here(args, 1)
    assert 1 + epoch[0][0] % 5 == 5  # the longest comes first
    assert [epoch] == updates_of_transformers(args, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 4, "dataloader_drop_last": True},
        {"num_train_epochs": 1.5},
        {"max_steps": 13},
    ],
)
def test_a_training_is_as_long_as_with_transformers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    args = arguments(tmp_path, **changes)
    trainer = transformers.Trainer(Model(), args, collate, rows())
    epochs, updates, _, _, _, _, steps = trainer.set_initial_training_values(
        args, trainer.get_train_dataloader()
    )
    length = length_of(args, SAMPLES)
    assert (length.epochs, length.updates, length.steps) == (epochs, updates, steps)
