"""The results' file: what is kept, and what a resumed run still measures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from tools.bench.results import Results, ResultsError
from tools.testbed import Household

CELL = "A/vit/S/pp"


def test_the_median_of_the_runs_counts() -> None:
    results = Results(None)
    for speed in (3.0, 100.0, 4.0):
        results.add_run(CELL, {"samples_per_s": speed})
    assert results.samples_per_s(CELL) == 4.0
    assert results.samples_per_s("A/vit/S/dp") is None


def test_a_resumed_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    Results(file).add_run(CELL, {"samples_per_s": 3.0})
    resumed = Results(file)
    assert resumed.runs_missing(CELL, repeat=1) == 0
    assert resumed.runs_missing(CELL, repeat=3) == 2
    assert resumed.runs_missing("A/vit/S/dp", repeat=1) == 1


def test_figures_of_other_cables_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    household = Household.load("A")
    results = Results(file)
    results.keep_household("A", list(map(asdict, household.devices)))
    resumed = Results(file)
    resumed.keep_household("A", list(map(asdict, household.devices)))
    with pytest.raises(ResultsError, match=r"bench\.json has figures of household A with other"):
        resumed.keep_household("A", list(map(asdict, household.at_rate("400mbit").devices)))


def test_a_failure_is_tried_again() -> None:
    results = Results(None)
    results.add_run(CELL, {"error": "not done within 300 s"})
    assert results.runs_missing(CELL, repeat=1) == 1
    assert results.why_not(CELL) == "not done within 300 s"
    results.add_run(CELL, {"samples_per_s": 3.0})
    assert results.why_not(CELL) is None


def test_forgetting_a_cell() -> None:
    results = Results(None)
    results.add_run(CELL, {"samples_per_s": 3.0})
    results.forget(CELL)
    assert results.runs(CELL) == []
    results.forget(CELL)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": "p2ptrain.plan/1"}', '{"format": "p2ptrain.bench/1", "cells": []}'],
)
def test_another_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(ResultsError, match=r"bench\.json"):
        Results(file)
    assert file.read_text() == text


def test_where_no_file_can_be_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"no folder .*nowhere for bench\.json"):
        Results(tmp_path / "nowhere" / "bench.json")
    with pytest.raises(ResultsError, match="cannot be read: Is a directory"):
        Results(tmp_path)


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    Results(file).put("versions", "torch", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
