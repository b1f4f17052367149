"""Stages on an accelerator: what a model writes, draws and asks for is where it computes."""

from __future__ import annotations

import pytest
import torch

from tests.support import model_idioms, odd_models, zoo
from tests.support.stage_pipeline import assert_same, captured, pipeline_step
from tests.support.twin_device import TwinDevice


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        (odd_models, "decayed_weight"),  # writes a parameter that the backward reads
        (odd_models, "normalised_weights"),  # writes a buffer that the forward reads
        (odd_models, "complex_weights"),
        (odd_models, "bounded_embedding"),
        (model_idioms, "drawing"),  # random numbers of several operators
        (model_idioms, "adapting"),  # asks for a number on the way
        (zoo, "dropout"),
    ],
    ids=lambda made: made[1],
)
def test_a_step_is_the_processors(made: tuple[object, str], split: bool) -> None:
    module, name = made
    example = module.make(name)  # type: ignore[attr-defined]
    model = captured(example)
    units = len(model.description.units)
    boundaries = sorted({0, units // 2, units})
    torch.manual_seed(0)
    here = pipeline_step(example, model, boundaries, split=split, hashes=True)
    twin = TwinDevice()
    twin.prepare_thread()
    torch.manual_seed(0)
    assert_same(here, pipeline_step(example, model, boundaries, split=split, device=twin))
    twin.assert_empty()
