"""When a stage may make updates that do not count yet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.model.captured import Captured
from p2ptrain.training.assignment import StagePlace
from p2ptrain.training.stage_lines import StageLines
from tests.unit.training.test_assignment import assignment, shared
from tests.unit.training.test_live_stage import captured

__all__ = ["captured"]

ALONE, GROUP = shared(4), replace(shared(3, 1), turn=2)


@pytest.mark.parametrize(
    ("place", "optimizer", "goes_ahead", "trails"),
    [
        (GROUP, {}, True, True),
        (GROUP, {"foreach": True}, False, False),
        (GROUP, {"fused": True}, False, False),
        (GROUP, {"foreach": False}, True, True),
        (ALONE, {"foreach": True}, True, False),
    ],
)
def test_no_loop_writes_to_sums_that_still_travel(
    captured: Captured,
    place: StagePlace,
    optimizer: dict[str, bool],
    goes_ahead: bool,
    trails: bool,
) -> None:
    """Torch's SGD(nesterov, foreach) does, and another device would get what it has written."""
    description = captured.description
    whole = replace(place, end=len(description.units), goes_ahead=True)
    job = replace(assignment(whole), optimizer=optimizer)
    shell = cast(Any, SimpleNamespace(mesh=SimpleNamespace(self_id="a")))
    task = StageLines(job, 0, description, shell).task()
    assert (task.goes_ahead, task.trails) == (goes_ahead, trails)
