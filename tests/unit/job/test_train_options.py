"""What apps say of how a job is to be run; they write texts where the command line has paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from p2ptrain.errors import OptionError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.train_options import ReplanMethod, TrainOptions
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.plan.types.weight_versions import Weights


def test_texts_are_taken_for_what_they_name() -> None:
    given: dict[str, Any] = {"out": "w.safetensors", "checkpoint": "c", "resume": "r"}
    options = TrainOptions(**given, wire="bf16", recovery="heavy", steps=numpy.int64(3))  # type: ignore[arg-type]
    assert options.out == Path("w.safetensors")
    assert (options.checkpoint, options.resume) == (Path("c"), Path("r"))
    assert options.wire is WireFormat.BF16
    assert options.recovery is ReplanMethod.HEAVY
    assert type(options.steps) is int


def test_a_mode_by_its_name_is_the_same_as_by_its_parts() -> None:
    how = AsyncOptions(Weights.VERTICAL)
    assert TrainOptions().asynchrony is None
    assert TrainOptions(mode="sync").asynchrony is None
    assert TrainOptions(mode="async").asynchrony == AsyncOptions()
    assert TrainOptions(mode="async", asynchrony=how).asynchrony == how
    auto = TrainOptions(mode="auto")
    assert (auto.asynchrony, auto.mode) == (AsyncOptions(), "auto")


def test_older_ways_to_say_the_mode_work_and_name_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="write mode='async' too") as seen:
        assert TrainOptions(asynchrony=AsyncOptions()) == TrainOptions(mode="async")
    assert seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="write mode='auto' too"):
        assert TrainOptions(chooses_mode=True) == TrainOptions(mode="auto")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "asynchronous"}, "mode must be 'sync', 'async' or 'auto', not 'asynchronous'"),
        ({"mode": "sync", "asynchrony": AsyncOptions()}, "asynchrony is for mode 'async' or"),
        ({"out": 3}, "out must be a path, not 3"),
        ({"wire": "fp4"}, "wire must be one of exact, bf16, int8, not 'fp4'"),
        ({"recovery": "no"}, "recovery must be one of light, heavy, respipe, not 'no'"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"asynchrony": True}, "asynchrony must be a p2ptrain.AsyncOptions"),
        ({"wait_for": "2"}, "wait_for must be a whole number, not '2'"),
        ({"wait_for": None}, "wait_for counts this device too"),
        ({"wait_timeout_seconds": "3"}, "wait_timeout_seconds must be 0 seconds or more, not '3'"),
        ({"wait_timeout_seconds": float("nan")}, "must be 0 seconds or more, not nan"),
    ],
)
def test_what_cannot_be_taken_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(**given)


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
        ({"groups": None}, "borders of units"),
        ({"groups": numpy.array([0, 4])}, "borders of units"),
        ({"grid": ()}, "from 1 on"),
    ],
)
def test_a_grid_and_groups_are_checked_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(planner="tiles", **given)


def test_a_grid_and_groups_may_be_given() -> None:
    options = TrainOptions(planner="tiles", grid=(2, 3), groups=(0, 1, 4))
    assert (options.grid, options.groups) == ((2, 3), (0, 1, 4))
    assert TrainOptions(planner="tiles", grid=[2, 3], groups=[0, 1, 4]) == options  # type: ignore[arg-type]


def test_paths_may_be_texts() -> None:
    options = TrainOptions(plan="plan.json", dry_run=True, write_profile="p.json")  # type: ignore[arg-type]
    assert (options.plan, options.write_profile) == (Path("plan.json"), Path("p.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"write_plan": "p.json"}, "are for dry_run"),
        ({"plan": "p.json", "planner": "pp"}, "leaves no choice"),
        ({"plan": "p.json", "mode": "auto"}, "leaves no choice"),
        ({"plan": 7}, "plan must be a path"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainOptions(**options)
