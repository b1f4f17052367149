"""A backward in two parts gives the bits of a whole one, and keeps what its second part needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.model import pipeline
from tests.unit.model.conftest import Prepared
from tests.unit.model.test_stage import _PLAIN, assert_same

Get = Callable[..., Prepared]


@pytest.mark.parametrize("name", _PLAIN)
def test_every_unit_a_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    boundaries = range(case.units + 1)
    assert_same(case.plain, pipeline.pipeline_step(case.made, case.model, boundaries, split=True))


@pytest.mark.parametrize("name", _PLAIN)
def test_one_stage_gives_plain_torch_bits(prepared: Get, name: str) -> None:
    case = prepared(name)
    whole = (0, case.units)
    assert_same(case.plain, pipeline.pipeline_step(case.made, case.model, whole, split=True))
