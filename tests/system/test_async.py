"""Real processes train without a barrier; one of them is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from p2ptrain.cli.script import load_job
from p2ptrain.job.asynchrony import AsyncOptions
from tests.integration.training.delayed import by_formula
from tests.system.household import Household

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "jobs" / "small.py"
CODE = "48151623"
STEPS = 150
DEATH = 40


async def test_a_killed_process_costs_steps_and_no_mixture_of_versions(
    household: Household, tmp_path: Path
) -> None:
    out = tmp_path / "weights.safetensors"
    arguments = ["train", str(SCRIPT), "-o", "epochs=1000", "--steps", str(STEPS)]
    arguments += ["--mode", "async", "--planner", "pp", "--wait-for", "3", "--wait-timeout", "120"]
    holder = await household.start("desk", *arguments, "--code", CODE, "--out", str(out))
    members = [await household.start(name, "join", "--code", CODE) for name in ("a", "b")]
    await holder.expect("step", step=DEATH)
    await members[0].kill()
    await holder.succeed()
    first, second = holder.events("plan")
    assert (first["mode"], first["micro_batches"], len(first["stages"])) == ("async", 1, 3)
    assert (second["reason"], len(second["stages"])) == ("failure", 2)
    steps = holder.events("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    (recovered,) = holder.events("recovered")
    told = sum(e["event"] == "step" for e in holder.said[: holder.said.index(recovered)])
    version = told - recovered["replayed_steps"]
    names, cut = ([stage["parameters"] for stage in plan["stages"]] for plan in (first, second))
    job, how = load_job(str(SCRIPT), ()), AsyncOptions()
    undisturbed = by_formula(load_job(str(SCRIPT), ()), names, how, told)
    wanted = by_formula(job, names, how, STEPS, empty={version: cut})
    losses = [step["loss"] for step in steps]
    assert losses == undisturbed.losses + wanted.losses[told:]
    found = load_file(out)
    assert all(found[name].equal(tensor) for name, tensor in wanted.state_dict.items())
