"""What dividing micro-batches by samples would change, read from captured models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.graph.values import BATCH, Polynomial, ValueDescription, sample_dimension
from p2ptrain.model.sample_independence.division_effects import (
    division_effects,
)
from tests.support.prepared_models import Get


@pytest.mark.parametrize(
    ("dimensions", "expected"),
    [
        ((BATCH, Polynomial((3,))), 0),
        ((Polynomial((3,)), BATCH), 1),
        ((Polynomial((0, 5)),), None),
        ((Polynomial((1, 1)),), None),
        ((BATCH, BATCH), None),
        ((Polynomial((3,)),), None),
        ((), None),
    ],
)
def test_samples_lie_along_the_one_dimension_of_the_batch(
    dimensions: tuple[Polynomial, ...], expected: int | None
) -> None:
    value = ValueDescription("value", torch.float32, dimensions, True)
    assert sample_dimension(value) == expected


@pytest.mark.parametrize("name", ["mlp", "gpt", "views"])
def test_models_that_compute_each_sample_alone_divide_without_effects(
    prepared: Get, name: str
) -> None:
    assert division_effects(prepared(name).model.description) == ()


def test_what_looks_across_samples_is_named_with_its_unit(prepared: Get) -> None:
    (statistics,) = division_effects(prepared("cnn").model.description)
    assert statistics.startswith(
        "BatchNorm statistics are those of each part of a micro-batch (layer "
    )
    (random,) = division_effects(prepared("dropout").model.description)
    assert random.startswith("dropout and its like draw other random numbers (layer ")


def _effects_of(
    model: nn.Module, loss: Callable[..., Tensor], example: tuple[Tensor, Tensor]
) -> tuple[str, ...]:
    return division_effects(capture(model, loss, example, evaluation=False).description)


def test_gradients_scaled_by_how_often_an_index_comes_up_are_named() -> None:
    def effects(**options: Any) -> tuple[str, ...]:
        model = nn.Sequential(nn.Embedding(6, 4, **options), nn.Flatten(), nn.Linear(8, 4))
        example = torch.arange(8).view(4, 2) % 6, torch.arange(4)
        return _effects_of(model, nn.CrossEntropyLoss(), example)

    assert effects() == ()
    (effect,) = effects(scale_grad_by_freq=True)
    assert effect.startswith("embeddings divide gradients by how often a part has each index")
