"""Capturing takes a second, so each model is captured once for all tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from p2ptrain.model.capture.captured import Captured
from tests.support import odd_models, stage_pipeline, zoo

torch.set_num_threads(1)


@dataclass(frozen=True)
class Prepared:
    """A model, its capture, and one step of it in plain torch."""

    made: zoo.Made
    model: Captured
    plain: stage_pipeline.Result

    @property
    def units(self) -> int:
        return len(self.model.description.units)


EVALUATED = (
    *("mlp", "cnn", "gpt", "two_inputs", "named_inputs", "frozen", "inner_structures"),
    *("reassigned_buffer", "codebook", "in_place", "shared_layer", "constant_parts", "views"),
    *("bounded_embedding", "outputs_with_constants", "recurrent", "attention"),
    *("normalised_weights", "channels_last", "llama"),
)
"""Others compute in evaluation mode as in training, or as one of these does."""

Get = Callable[..., Prepared]
"""What the fixture `prepared` gives."""
_PREPARED: dict[tuple[str, torch.dtype], Prepared] = {}


def prepare(name: str, dtype: torch.dtype = torch.float32) -> Prepared:
    """Of a model of the zoo or an odd one, by its name."""
    if (name, dtype) not in _PREPARED:
        if name in odd_models.NAMES:
            made = odd_models.make(name, samples=stage_pipeline.BATCH)
        else:
            made = zoo.make(name, samples=stage_pipeline.BATCH, dtype=dtype)
        plain = stage_pipeline.plain_step(made)
        model = stage_pipeline.captured(
            made, evaluation=name in EVALUATED and dtype == torch.float32
        )
        _PREPARED[name, dtype] = Prepared(made, model, plain)
    return _PREPARED[name, dtype]


@pytest.fixture
def prepared() -> Get:
    """`prepare`."""
    return prepare
