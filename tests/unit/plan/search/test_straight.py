"""Pipelines of single devices: every one is a candidate where that is possible."""

from __future__ import annotations

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.straight import StraightSearch
from p2ptrain.plan.types.allocation import BatchSplit
from tests.support import planning_examples


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(("units", "devices"), [(1, 20), (2, 20), (3, 20), (4, 4), (5, 3)])
def test_no_more_devices_are_tried_than_there_are_units(
    units: int, devices: int, private: bool
) -> None:
    """Orders of twenty devices are more than can ever be listed."""
    profile = planning_examples.profile([(1.0, 1.0)] * units)
    names = [f"device{number}" for number in range(devices)]
    cost = CostModel(profile, planning_examples.cluster(*names))
    judge, split = Judge(cost, 1000), BatchSplit(4, 1)
    search = StraightSearch(Question(judge, (split,), tuple(range(devices)), private=private))
    found = list(search.every_placement())
    assert len(set(found)) == len(found) == search.count_placements()
    assert all(len(chosen) <= units for _, chosen in found)
