"""Models that take seconds to capture: cuts, split backwards and evaluation give torch's bits."""

from __future__ import annotations

import pytest

from tests.integration.model.stage.test_stage import SLOW, assert_evaluates
from tests.support import stage_pipeline
from tests.support.prepared_models import Get
from tests.support.stage_pipeline import assert_same

CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
"""Torch's own encoder takes another path without gradients: there only the digits agree."""


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", SLOW)
def test_every_unit_a_stage_and_one_stage_give_plain_torch_bits(
    prepared: Get, name: str, split: bool
) -> None:
    case = prepared(name)
    for boundaries in (range(case.units + 1), (0, case.units)):
        ours = stage_pipeline.pipeline_step(case.made, case.model, boundaries, split=split)
        assert_same(case.plain, ours)


@pytest.mark.parametrize("name", SLOW)
def test_evaluation_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    assert_evaluates(prepared(name), **(CLOSE if name == "attention" else {}))
