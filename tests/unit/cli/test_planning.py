"""`plan` and `simulate` as they are used: files in, a plan, a timeline and a chart out."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from p2ptrain.cli import main
from p2ptrain.cli.commands.plan import plan_request
from p2ptrain.cli.planner_arguments import PLANNERS
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.tiling.planning.make_plan import NAMES
from tests.support import planning_examples
from tests.unit.tiling.planning import test_tiled_plan as tiles

MODEL = planning_examples.profile(
    [(0.1, 0.2)] * 4, parameter_bytes=1000, activation_bytes=100, input_bytes=10, target_bytes=1
)
HOUSE = Cluster(
    (
        ClusterDevice("laptop", 10**6, 1.0, holder=True),
        ClusterDevice("pi", 10**6, 2.0),
        ClusterDevice("old-phone", 100, 30.0),
    ),
    ClusterLink(1e6, 0.0),
)

Run = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p.json").write_text(json.dumps(MODEL.to_json()))
    (tmp_path / "c.json").write_text(json.dumps(HOUSE.to_json()))
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in the folder; returns its stdout."""
    monkeypatch.chdir(folder)

    def run(command: str, *more: str) -> str:
        assert main.main([command, "--profile", "p.json", "--cluster", "c.json", *more]) == 0
        captured = capfd.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_json_is_the_plan_on_one_line(run: Run) -> None:
    out = run("plan", "--batch-size", "8", "--straight", "--json")
    assert out.count("\n") == 1
    plan = Plan.from_json(json.loads(out))
    assert plan.to_json() == json.loads(out)
    assert [stage.devices[0].name for stage in plan.stages] == ["laptop", "pi"]
    assert [left.name for left in plan.left_out] == ["old-phone"]


def test_people_read_stages_memory_and_reasons(run: Run) -> None:
    out = run("plan", "--batch-size", "8", "--micro-batch", "2", "--straight")
    assert "8 samples in 4 micro-batches of 2" in out
    assert "0-2 (unit0 to unit2)" in out
    assert "samples/s" in out
    assert "old-phone: " in out
    assert out.count("  1 MB") == 2  # the budgets


def test_people_read_that_one_device_alone_is_faster(run: Run, folder: Path) -> None:
    slow_link = replace(HOUSE, default_link=ClusterLink(10.0, 1.0))
    (folder / "c.json").write_text(json.dumps(slow_link.to_json()))
    asked = ("--batch-size", "8", "--exclude", "old-phone")
    said = "laptop alone would be faster: 0.8 samples/s (--planner single)"
    assert said in run("plan", *asked, "--planner", "pp")
    assert "alone would be faster" not in run("plan", *asked, "--planner", "single")
    assert "alone would be faster" not in run("plan", *asked)


def test_out_writes_the_same_plan(run: Run, folder: Path) -> None:
    run(
        "plan",
        "--batch-size",
        "8",
        "--planner",
        "pp",
        "--exclude",
        "old-phone",
        "--out",
        "plan.json",
    )
    written = json.loads((folder / "plan.json").read_text())
    assert written == json.loads(
        run("plan", "--batch-size", "8", "--planner", "pp", "--exclude", "old-phone", "--json")
    )


def test_constraints_reach_the_planners(run: Run) -> None:
    alone = json.loads(
        run("plan", "--batch-size", "8", "--straight", "--exclude", "laptop", "--json")
    )
    assert [device["name"] for stage in alone["stages"] for device in stage["devices"]] == ["pi"]
    assert {out["name"] for out in alone["left_out"]} == {"laptop", "old-phone"}


def test_the_request_is_what_the_options_say() -> None:
    args = _parsed(
        *("--batch-size", "16", "--micro-batch", "4", "--planner", "pp", "--private"),
        *("--exclude", "old-phone", "--require", "pi", "laptop", "--cap", "pi=0.5"),
        *("--straight", "--mode", "async"),
    )
    assert plan_request(args, HOUSE) == PlanRequest(
        batch_size=16,
        micro_batch=4,
        planner="pp",
        private=True,
        only=frozenset({"laptop", "pi"}),
        required=frozenset({"laptop", "pi"}),
        caps={"pi": 0.5},
        groups=False,
        mode=PlanMode.ASYNC,
    )
    assert plan_request(_parsed("--batch-size", "16", "--overlap"), HOUSE) == PlanRequest(
        16, overlap=True
    )


def _parsed(*argv: str) -> argparse.Namespace:
    files = ("--profile", "p.json", "--cluster", "c.json")
    return main.build_parser().parse_args(["plan", *files, *argv])


def test_a_simulation_tells_the_round_and_every_entry(run: Run) -> None:
    run("plan", "--batch-size", "8", "--micro-batch", "3", "--straight", "--out", "plan.json")
    body: dict[str, Any] = json.loads(run("simulate", "--plan", "plan.json", "--json"))
    plan = json.loads(Path("plan.json").read_text())
    for key in ("round_seconds", "samples_per_s", "peak_bytes"):
        assert body[key] == plan["predicted"][key]
    assert set(body["busy_share"]) == {"laptop", "pi"}
    assert body["busy_share"]["pi"] + body["waiting_share"]["pi"] == pytest.approx(1)
    for entry in body["timeline"]:
        assert set(entry) == {
            *("kind", "device", "stage", "micro_batch", "start", "end", "receiver")
        }
    kinds = [entry["kind"] for entry in body["timeline"]]
    assert kinds.count("forward") == kinds.count("backward") == 2 * 3
    assert max(entry["end"] for entry in body["timeline"]) == body["round_seconds"]


def test_people_read_who_is_busy_and_who_lacks_memory(run: Run, folder: Path) -> None:
    run("plan", "--batch-size", "8", "--micro-batch", "2", "--straight", "--out", "plan.json")
    assert "too little" not in run("simulate", "--plan", "plan.json")
    content = HOUSE.to_json()
    content["devices"][0]["memory_bytes"] = 1000
    (folder / "c.json").write_text(json.dumps(content))
    out = run("simulate", "--plan", "plan.json")
    assert "samples/s" in out
    [line] = [line for line in out.splitlines() if "too little memory" in line]
    assert line.startswith("laptop")


def test_anyones_plan_can_be_simulated(run: Run, folder: Path) -> None:
    """Its predictions may be of another model; then the last micro-batch is a full one."""
    stage = {"devices": [{"name": "laptop", "share": 3}], "warmup": 1}
    content = {
        "format": "p2ptrain.plan/1",
        "planner": "by hand",
        "micro_batch": 3,
        "micro_batches": 2,
        "stages": [{"units": [0, 4], **stage}],
        "predicted": {"round_seconds": 7, "samples_per_s": 100, "peak_bytes": {}},
        "left_out": [{"name": "pi", "reason": ""}, {"name": "old-phone", "reason": "slow"}],
    }
    (folder / "plan.json").write_text(json.dumps(content))
    seconds = [
        json.loads(run("simulate", "--plan", "plan.json", "--json", *more))["round_seconds"]
        for more in ([], ["--batch-size", "5"])
    ]
    assert seconds == pytest.approx([6 * 1.2, 5 * 1.2])


def test_the_chart_is_written(run: Run, folder: Path) -> None:
    run("plan", "--batch-size", "8", "--micro-batch", "2", "--straight", "--out", "plan.json")
    run("simulate", "--plan", "plan.json", "--gantt", "round.svg")
    root = ElementTree.parse(folder / "round.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_a_plan_with_tiles_has_a_timeline_and_a_chart(run: Run, folder: Path) -> None:
    """As `profile` writes `spatial` of a convolutional network, `plan` alone may find tiles."""
    (folder / "p.json").write_text(json.dumps(tiles.profile().to_json()))
    (folder / "c.json").write_text(json.dumps(tiles.cluster(1.0, 1.0).to_json()))
    run("plan", "--batch-size", "1", "--out", "plan.json")
    assert json.loads(Path("plan.json").read_text())["found_by"] == "tiles"
    out = run("simulate", "--plan", "plan.json", "--json", "--gantt", "round.svg")
    body: dict[str, Any] = json.loads(out)
    assert max(entry["end"] for entry in body["timeline"]) == body["round_seconds"]
    kinds = {entry["kind"] for entry in body["timeline"]}
    assert {"forward", "backward", "exchange", "send input", "all-reduce", "update"} <= kinds
    root = ElementTree.parse(folder / "round.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    asked = ["simulate", "--profile", "p.json", "--cluster", "c.json", "--plan", "plan.json"]
    assert main.main([*asked, "--schedule", "1f1b"]) == 2


def test_the_command_line_knows_every_planner() -> None:
    assert set(PLANNERS) == NAMES


def test_planning_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys; from p2ptrain.cli.main import main;"
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    files = ["--profile", "p.json", "--cluster", "c.json"]
    argv = ["plan", *files, "--batch-size", "8", "--planner", "hybrid", "--json"]
    subprocess.run([sys.executable, "-c", code, *argv], cwd=folder, check=True, capture_output=True)


def test_asynchronous_plans_are_of_mini_batches(run: Run, folder: Path) -> None:
    asked = ("--batch-size", "4", "--micro-batch", "9", "--mode", "async", "--straight")
    out = run("plan", *asked, "--out", "plan.json")
    assert "mini-batches of 4, " in out
    assert " s a mini-batch, " in out
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["mode"], plan["micro_batch"]) == ("async", 4)
    body = json.loads(run("simulate", "--plan", "plan.json", "--gantt", "x.svg", "--json"))
    assert body["round_seconds"] == plan["predicted"]["round_seconds"]
    assert body["samples_per_s"] == pytest.approx(4 / body["round_seconds"])
    assert all(0 <= part <= 1 for part in body["waiting_share"].values())
    assert " s a mini-batch, " in (folder / "x.svg").read_text()
