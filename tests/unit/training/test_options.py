"""What apps give as options is held against what it must be before anything begins."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.training.options import TrainOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": "2x2"}, r"grid is \(rows, columns\), from 1 on, found '2x2'"),
        ({"grid": (0, 2)}, r"found \(0, 2\)"),
        ({"grid": (2,)}, "from 1 on"),
        ({"grid": (2.0, 2)}, "from 1 on"),
        ({"groups": (1, 2)}, r"groups are borders of units, rising from 0, .* found \(1, 2\)"),
        ({"groups": (0,)}, "borders of units"),
        ({"groups": (0, 2, 1)}, "borders of units"),
        ({"groups": (0, 1.5)}, "borders of units"),
        ({"groups": "0-3"}, "borders of units"),
    ],
)
def test_a_grid_and_groups_are_checked_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(planner="tiles", **given)


def test_a_grid_and_groups_may_be_given() -> None:
    options = TrainOptions(planner="tiles", grid=(2, 3), groups=(0, 1, 4))
    assert (options.grid, options.groups) == ((2, 3), (0, 1, 4))
