"""A household is measured, planned from the files, and trains by exactly that plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.household import Household
from tests.system.jobs import groups
from tests.system.test_groups import plain_losses

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(groups.__file__))
CODE = "48151623"


async def test_what_a_dry_run_writes_is_planned_and_trained(
    household: Household, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        await household.start(name, "join", "--code", CODE)
    files = {name: str(tmp_path / f"{name}.json") for name in ("profile", "cluster", "plan")}
    written = [word for name, file in files.items() for word in (f"--write-{name}", file)]
    train = ("train", SCRIPT, "--wait-for", "3", "--wait-timeout", "120", "--code", CODE)
    dry = await household.start("desk", *train, "--dry-run", *written)
    await dry.succeed()
    (found,) = dry.events("plan")
    assert not dry.events("step")
    assert not dry.events("done")
    assert _stages(found) == _stages(_content(files["plan"]))

    out = str(tmp_path / "pipeline.json")
    asked = ("--batch-size", "30", "--micro-batch", "4", "--planner", "pp", "--out", out)
    planned = await household.ask(
        "desk", "plan", "--profile", files["profile"], "--cluster", files["cluster"], *asked
    )
    assert planned.exit_code == 0, planned.stderr
    plan = _content(out)
    assert len(plan["stages"]) == 3
    assert {name for stage in plan["stages"] for name in stage["devices"][0].values()} >= {
        *("desk", "a", "b")
    }

    holder = await household.start("desk", *train, "--plan", out)
    await holder.succeed()
    (event,) = holder.events("plan")
    assert _stages(event) == _stages(plan)
    losses = [step["loss"] for step in holder.events("step")]
    assert losses == pytest.approx(plain_losses(1), rel=0, abs=1e-8)

    plan["stages"][2]["devices"][0]["name"] = "tv"
    _write(out, plan)
    refused = await household.start("desk", *train, "--plan", out)
    assert await refused.exit_code() == 1
    message = refused.said[-1]["message"]
    assert 'the plan uses "tv", which is not among the devices here: a, b, desk' in message


def _write(file: str, plan: dict[str, Any]) -> None:
    Path(file).write_text(json.dumps(plan))


def _content(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(file).read_text())
    return content


def _stages(plan: dict[str, Any]) -> list[tuple[list[int], list[dict[str, Any]], int]]:
    return [(stage["units"], stage["devices"], stage["warmup"]) for stage in plan["stages"]]
