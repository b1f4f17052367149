"""Fractions, ratios and the page made of them."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench import alone
from tools.bench.cells import Cell, Place, Rounds, rounds_of
from tools.bench.report import page, rows, same_training, table
from tools.bench.results import Results


def device(cores: float, piece_seconds: float) -> dict[str, Any]:
    return {
        "cores": cores,
        "micro_batch": 16,
        "piece_seconds": piece_seconds,
        "update_seconds": 0.0,
        "seconds_by_size": {"8": 0.9 * piece_seconds, "16": piece_seconds},
    }


def measured(**speeds: float) -> Results:
    """Household A, vit at S: two devices of 16 and 8 samples/s, together 24."""
    results = Results(None)
    own = {"fast": device(0.6, 1.0), "slow": device(0.3, 2.0)}
    results.put("alone", Place("A", "vit").key, {"devices": own})
    for system, speed in speeds.items():
        run = {"samples_per_s": speed, "aggregate": 24.0, "losses": [3.0, 2.0, 1.0]}
        results.add_run(Cell("A", "vit", "S", system.replace("_", "-")).key, run)
    return results


def test_aggregate_is_the_sum_of_what_devices_reach_alone() -> None:
    kept = {"devices": {"fast": device(0.6, 1.0), "slow": device(0.3, 2.0)}}
    assert alone.aggregate(kept, 128) == pytest.approx(24.0)


def test_updates_count_once_a_mini_batch() -> None:
    speed = alone.AloneSpeed(16, 1.0, 2.0, {16: 1.0})
    assert speed.samples_per_s(32) == pytest.approx(32 / 4)


def test_devices_of_one_class_are_taken_as_the_same() -> None:
    kept = {"devices": {"one": device(0.3, 1.0), "other": device(0.3, 3.0)}}
    own = alone.speeds(kept)
    assert own["one"] == own["other"]
    assert own["one"].piece_seconds == 2.0


def test_the_best_size_is_one_that_all_have_tried() -> None:
    assert alone.best_size([{"8": 1.0, "16": 1.5}, {"8": 1.0, "16": 1.9, "32": 2.0}]) == 16


def test_a_small_share_takes_the_best_micro_batch_that_fits() -> None:
    speed = alone.AloneSpeed(16, 1.0, 0.0, {4: 0.5, 8: 0.6, 16: 1.0})
    assert [speed.best_of_at_most(n) for n in (3, 4, 15, 16, 99)] == [3, 4, 8, 16, 16]


def test_fractions_and_ratio_to_the_rival() -> None:
    (row,) = rows(measured(ddp=12.0, pp=15.0, auto=18.0, torch=23.0))
    assert row.measured["ddp"] == pytest.approx(0.5)
    assert row.rival == pytest.approx(0.5)
    assert row.best_of_ours is not None
    assert row.best_of_ours[0] == "auto"
    assert row.best_of_ours[1] == pytest.approx(0.75)
    assert row.over_rival == pytest.approx(1.5)


def test_a_fraction_is_of_what_the_devices_reached_at_that_time() -> None:
    results = measured()
    for speed, reference in ((6.0, 12.0), (12.0, 24.0), (30.0, 40.0)):
        run = {"samples_per_s": speed, "aggregate": reference, "predicted_samples_per_s": 20.0}
        results.add_run("A/vit/S/pp", run)
    (row,) = rows(results)
    assert row.measured["pp"] == pytest.approx(0.5)
    assert row.predicted["pp"] == pytest.approx(0.5), "the last run's"


def test_until_auto_is_measured_the_best_planner_stands_for_it() -> None:
    (row,) = rows(measured(dp=6.0, pp=15.0))
    assert row.best_of_ours is not None
    assert row.best_of_ours[0] == "pp"
    assert row.best_of_ours[1] == pytest.approx(15 / 24)
    assert row.over_rival is None


def test_nothing_measured_gives_no_row() -> None:
    assert rows(Results(None)) == []


def test_losses_of_one_round_side_by_side() -> None:
    results = measured(ddp=1.0, pp=1.0)
    (row,) = rows(results)
    assert same_training(results, row, 2) == {"ddp": 1.0, "pp": 1.0}
    assert same_training(results, row, 3) == {}


def test_the_page_has_the_figures_and_says_what_is_missing() -> None:
    results = measured(ddp=12.0, pp=15.0)
    results.add_run("A/vit/S/ddp-default", {"error": "no such operator"})
    own = [{"name": "fast", "cores": 0.6, "rate_mbit": 100.0}] * 2
    results.put("households", "A", {"devices": own})
    text = page(results, rows(results))
    assert "| A | vit | S | 24/s | 0.50 | no | 0.62 | 1.25 |" in text
    assert "- A vit S ddp-default: no such operator" in text
    assert "- A: 2 x 0.6 core at 100 Mbit/s" in text


def test_a_table_without_lines_is_left_out() -> None:
    assert table([("a", "b")]) == ""
    assert table([("a", "b"), ("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_rounds_of_a_single_device_are_fewer() -> None:
    assert rounds_of(Cell("A", "vit", "S", "pp"), 4) == Rounds(2, 4)
    assert rounds_of(Cell("A", "vit", "S", "torch"), 4, 14) == Rounds(1, 2)


def test_only_p2ptrain_has_rounds_in_which_its_plan_settles() -> None:
    assert rounds_of(Cell("A", "vit", "S", "auto"), 4, 14) == Rounds(14, 4)
    assert rounds_of(Cell("A", "vit", "S", "ddp"), 4, 14) == Rounds(2, 4)
