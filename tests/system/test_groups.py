"""Real processes share one stage: plain torch's losses, and clear words when one goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import reference
from tests.system.household import Device, Household
from tests.system.jobs import groups

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(groups.__file__))
CODE = "48151623"


async def _start(household: Household, *arguments: str) -> tuple[Device, Device]:
    """A holder of three devices that all hold the whole model, and one of the others."""
    members = [await household.start(name, "join", "--code", CODE) for name in ("a", "b")]
    await members[0].expect("member", name="b", state="alive")
    await members[1].expect("member", name="a", state="alive")
    train = ("train", SCRIPT, "--planner", "dp", "--wait-for", "3", "--wait-timeout", "120")
    return await household.start("desk", *train, "--code", CODE, *arguments), members[0]


def plain_losses(epochs: int) -> list[float]:
    """Of the contract's loop; the last micro-batch of each batch has two samples."""
    job = groups.job()
    recipe = reference.Recipe(
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        batch_size=job.batch_size,
        micro_batch=job.micro_batch,
        epochs=epochs,
        seed=job.seed,
    )
    data = [job.data[index] for index in range(len(job.data))]
    return reference.train(job.model, data, job.loss, recipe).losses


async def test_a_group_resumes_and_ends_with_plain_torchs_losses(
    household: Household, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    holder, _ = await _start(household, "--epochs", "7", "--steps", "20", "--checkpoint", folder)
    await holder.succeed()
    (plan,) = holder.events("plan")
    (stage,) = plan["stages"]
    assert {device["name"] for device in stage["devices"]} == {"desk", "a", "b"}
    assert not plan["changes_results"]
    train = ("train", SCRIPT, "--planner", "dp", "--wait-for", "3", "--resume", folder)
    again = await household.start("desk", *train, "--epochs", "7", "--code", CODE)
    await again.succeed()
    steps = holder.events("step") + again.events("step")
    assert [step["step"] for step in steps] == list(range(1, 57))
    losses = [step["loss"] for step in steps]
    assert losses == pytest.approx(plain_losses(7), rel=0, abs=1e-8)


async def test_a_member_that_is_killed_is_missed_by_nobody(household: Household) -> None:
    """The others of the group have all that it had: no step is done again."""
    holder, member = await _start(household, "--epochs", "12")
    await holder.expect("step", step=3)
    await member.kill()
    await holder.succeed()
    assert holder.events("failure") == [{"event": "failure", "name": "a"}]
    (recovered,) = holder.events("recovered")
    assert recovered["replayed_steps"] <= 1
    losses = [step["loss"] for step in holder.events("step")]
    assert losses == pytest.approx(plain_losses(12), rel=0, abs=1e-8)


async def test_one_bad_sample_names_device_step_and_unit(household: Household) -> None:
    holder, _ = await _start(household, "-o", "not_finite=77")
    assert await holder.exit_code() == 1
    message = holder.said[-1]["message"]
    order = torch.randperm(240, generator=torch.Generator().manual_seed(3)).tolist()
    step = order.index(77) // 30
    assert f"became nan at step {step + 1}" in message
    assert "The data contain NaN or infinity (sample 77 of the data)" in message
