"""Unmodified models of the transformers library: one stage a unit, bit for bit; split backwards."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference, stage_pipeline, zoo
from tests.support.prepared_models import Get
from tests.support.stage_pipeline import assert_same
from tests.support.zoo_transformers import TRANSFORMERS

_IN_FLOAT64 = [name for name in TRANSFORMERS if name != "mixtral"]
"""torch's grouped products know no float64."""


@pytest.mark.parametrize("name", _IN_FLOAT64)
def test_every_model_trains_in_float64(name: str) -> None:
    made = zoo.make(name, samples=8, dtype=torch.float64)
    recipe = reference.Recipe(
        lambda parameters: torch.optim.SGD(parameters, lr=0.05), batch_size=8, micro_batch=3
    )
    assert len(reference.train(made.model, made.data, made.loss, recipe).losses) == 1
    assert {p.dtype for p in made.model.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_unit_a_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    ours = stage_pipeline.pipeline_step(case.made, case.model, range(case.units + 1))
    assert_same(case.plain, ours)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_split_backwards_give_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    boundaries = (0, case.units // 3, case.units)
    assert_same(
        case.plain, stage_pipeline.pipeline_step(case.made, case.model, boundaries, split=True)
    )
