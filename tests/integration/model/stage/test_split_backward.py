"""A backward in two parts gives the bits of a whole one."""

from __future__ import annotations

import pytest

from tests.integration.model.stage.test_stage import PLAIN
from tests.support import stage_pipeline
from tests.support.prepared_models import Get
from tests.support.stage_pipeline import assert_same


@pytest.mark.parametrize("name", PLAIN)
def test_every_unit_a_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    boundaries = range(case.units + 1)
    assert_same(
        case.plain, stage_pipeline.pipeline_step(case.made, case.model, boundaries, split=True)
    )


@pytest.mark.parametrize("name", PLAIN)
def test_one_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    whole = (0, case.units)
    assert_same(case.plain, stage_pipeline.pipeline_step(case.made, case.model, whole, split=True))
