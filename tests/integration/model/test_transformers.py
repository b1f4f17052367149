"""Unmodified models of the transformers library: one stage a unit, bit for bit; split backwards."""

from __future__ import annotations

import pytest

from tests.support import stage_pipeline
from tests.support.prepared_models import Get
from tests.support.stage_pipeline import assert_same
from tests.support.zoo_transformers import TRANSFORMERS


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
