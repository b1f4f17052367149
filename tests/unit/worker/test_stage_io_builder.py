"""What its place says of a stage's updates and sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import (
    SGD,
)
from p2ptrain.model.stage.stage import Stage
from p2ptrain.worker.stage_io_builder import StageIoBuilder
from tests.unit.messages.test_assignment import assignment, shared
from tests.unit.runtime.test_live_stage import captured
from tests.unit.runtime.test_trailing_update import captured as summable

__all__ = ["captured", "summable"]

ALONE, GROUP = shared(4), replace(shared(3, 1), turn=2)


@pytest.mark.parametrize(
    ("place", "optimizer", "goes_ahead", "trails"),
    [
        (GROUP, SGD(), True, True),
        (GROUP, SGD(foreach=True), False, False),
        (GROUP, SGD(fused=True), False, False),
        (GROUP, SGD(foreach=False), True, True),
        (ALONE, SGD(foreach=True), True, False),
    ],
)
def test_no_loop_writes_to_sums_that_still_travel(
    captured: Captured,
    place: StageAssignment,
    optimizer: OptimizerSpec,
    goes_ahead: bool,
    trails: bool,
) -> None:
    """Torch's SGD(nesterov, foreach) does, and another device would get what it has written."""
    description = captured.description
    whole = replace(place, end=len(description.units), goes_ahead=True)
    job = replace(assignment(whole), optimizer=optimizer)
    shell = cast(Any, SimpleNamespace(mesh=SimpleNamespace(self_id="a")))
    task = StageIoBuilder(job, 0, description, shell).task()
    assert (task.goes_ahead, task.trails) == (goes_ahead, trails)


@pytest.mark.parametrize("turn", [None, 2])
def test_its_buckets_have_the_size_of_its_place(summable: Captured, turn: int | None) -> None:
    """Of 32 bytes; an eighth of it where the next round's forward waits for the first units'."""
    description = summable.description
    units = len(description.units)
    whole = replace(GROUP, end=units, goes_ahead=True, turn=turn, bucket_bytes=32)
    lines = StageIoBuilder(assignment(whole), 0, description, cast(Any, None))
    summed = lines.summed(Stage(description, 0, units, summable.state(), shared=True))
    late = [b for b in summed.buckets if summed.rank(b.index) < min(turn or 0, units)]
    others = [bucket for bucket in summed.buckets if bucket not in late]
    assert bool(late) == (turn is not None)
    firsts = [b[0].elements * b[0].dtype.itemsize for b in (others, late) if b]
    assert firsts == [32, 4][: len(firsts)]
