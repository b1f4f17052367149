"""`plan --compare`: every planner on one question."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.cli import main
from p2ptrain.cli.commands.plan import compare
from p2ptrain.cli.planner_arguments import PLANNERS
from p2ptrain.errors import PlanError
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from tests.support import planning_examples
from tests.support.planning_examples import quick_request

MODEL = planning_examples.profile(
    [(0.1, 0.2)] * 4, parameter_bytes=1000, input_bytes=10, target_bytes=1
)
HOUSE = Cluster(
    (ClusterDevice("laptop", 10**6, 1.0, holder=True), ClusterDevice("pi", 10**6, 2.0)),
    ClusterLink(1e6, 0.0),
)

Compare = Callable[..., str]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Compare:
    """Compare the planners; returns stdout."""
    (tmp_path / "p.json").write_text(json.dumps(MODEL.to_json()))
    (tmp_path / "c.json").write_text(json.dumps(HOUSE.to_json()))
    monkeypatch.chdir(tmp_path)

    def run(*more: str) -> str:
        argv = ["plan", "--profile", "p.json", "--cluster", "c.json"]
        argv += ["--batch-size", "8", "--micro-batch", "2"]
        assert main.main([*argv, "--compare", *more]) == 0
        return capfd.readouterr().out

    return run


def bodies(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_is_one_object_a_planner_the_best_first(run: Compare) -> None:
    found = bodies(run("--json"))
    assert found[0]["planner"] == "auto"
    assert {body["planner"] for body in found} == set(PLANNERS)
    assert "this profile has no convolution sizes" in found.pop()["error"]
    speeds = [body["samples_per_s"] for body in found]
    assert speeds == sorted(speeds, reverse=True)
    for body in found:
        predicted = body["plan"]["predicted"]
        assert body["plan"]["planner"] == body["planner"]
        assert body["round_seconds"] == predicted["round_seconds"]
        assert body["of_auto"] == pytest.approx(body["samples_per_s"] / speeds[0])
        assert body["devices"] == len(predicted["peak_bytes"])
        assert body["peak_bytes"] == max(predicted["peak_bytes"].values())


def test_planners_without_a_plan_say_why(run: Compare) -> None:
    refused = {body["planner"]: body for body in bodies(run("--private", "--json"))}["dp"]
    assert set(refused) == {"planner", "error"}
    assert "--private forbids" in refused["error"]


def test_people_read_a_table(run: Compare) -> None:
    table, reasons = run().split("no plan:")
    assert "  tiles: " in reasons
    titles, best, *others = table.splitlines()
    assert "tiles" not in [line.split()[0] for line in others if line]
    assert titles.split()[:3] == ["planner", "seconds", "samples/s"]
    assert (best.split()[0], best.split()[3]) == ("auto", "1.000")
    assert "4 x 2" in best
    assert [line.split()[0] for line in others if line.startswith("single")] == ["single"]


def test_what_each_device_adds_is_said(run: Compare) -> None:
    best = bodies(run("--json"))[0]
    assert best["added_by"] == {
        "laptop": pytest.approx(best["samples_per_s"] / (8 / 19.2) - 1, rel=1e-4),
        "pi": pytest.approx(best["samples_per_s"] / (8 / 9.6) - 1, rel=1e-4),
    }
    lines = run().rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == ["device", "laptop", "pi"]
    assert f"{best['added_by']['pi']:+.1%}" in lines[2]
    private = run("--private").rpartition("\n\n")[2]
    assert "everything  with --private the plan needs laptop" in private


def test_a_slow_device_beside_a_card_adds_nothing() -> None:
    card = ClusterDevice("desktop", 10**6, 0.01, compute="card")
    found = compare(MODEL, replace(HOUSE, devices=(*HOUSE.devices, card)), quick_request(8))
    assert (found.added_by("desktop") or 0) > 50
    assert found.without.keys() <= {"desktop", "laptop"}
    assert "pi" in {out.name for out in found.plans[0].left_out}


def test_units_that_take_no_time_are_compared_too() -> None:
    nothing = compare(planning_examples.profile([(0.0, 0.0)] * 2), HOUSE, quick_request(8))
    assert {nothing.of_auto(plan) for plan in nothing.plans} == {1.0}


def test_where_auto_finds_nothing_no_planner_does() -> None:
    tiny = Cluster((ClusterDevice("laptop", 10, 1.0, holder=True),), ClusterLink(1e6, 0.0))
    with pytest.raises(PlanError, match="laptop"):
        compare(MODEL, tiny, quick_request(8))


def test_a_comparison_is_not_one_plan(run: Compare, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--profile", "p.json", "--cluster", "c.json", "--batch-size", "8", "--compare"]
    assert main.main([*argv, "--out", "plan.json"]) == 2
    assert "--out writes one plan" in capfd.readouterr().err
    assert not Path("plan.json").exists()
    with pytest.raises(SystemExit, match="2"):
        main.main([*argv, "--planner", "pp"])
