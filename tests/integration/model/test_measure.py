"""A model is worked on unit by unit, in little memory."""

from __future__ import annotations

import pytest

from p2ptrain.model.measure import work_on
from tests.unit.model.conftest import Get


@pytest.mark.parametrize("name", ["cnn", "bert"])
def test_working_on_needs_no_more_than_a_unit_where_memory_is_short(
    prepared: Get, name: str
) -> None:
    description = prepared(name).model.description
    steps = work_on(description, 2, 1)
    for _ in range(len(description.units) + 1):
        next(steps)
