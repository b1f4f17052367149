"""`train` is killed and started again, as real processes: the job continues as if nothing was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.household import Device, Household

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]

SMALL_JOB = str(Path(__file__).parent / "jobs" / "small.py")
CODE = "48151623"
STEPS = ("-o", "epochs=1000", "--steps", "40")


def _losses(*devices: Device) -> dict[int, float]:
    told = [event for device in devices for event in device.events("step")]
    assert len({event["step"] for event in told}) == len(told), "a step was told twice"
    return {event["step"]: event["loss"] for event in told}


@pytest.mark.parametrize("joined", [False, True])
async def test_a_killed_train_that_is_started_again_goes_on_to_the_same_bits(
    household: Household, tmp_path: Path, joined: bool
) -> None:
    """With `joined`, a `join` of the same folder lends its place, and has it back in between."""
    kept, out = tmp_path / "alone.safetensors", tmp_path / "weights.safetensors"
    reference = await household.start(
        "alone", "train", SMALL_JOB, "--local", *STEPS, "--out", str(kept)
    )
    await reference.succeed()
    names = ("a", "b", "desk") if joined else ("a", "b")
    members = {name: await household.start(name, "join", "--code", CODE) for name in names}
    if joined:
        await members["desk"].expect("ready")
    arguments = ("train", SMALL_JOB, "--wait-for", "3", "--planner", "pp", *STEPS)
    arguments = (*arguments, "--out", str(out), "--code", CODE)
    holder = await household.start("desk", *arguments)
    await holder.expect("step", step=10)
    said = len(members["desk"].said) if joined else 0
    await holder.kill()
    for name in ("a", "b"):
        await members[name].expect("waiting", **{"for": "desk"})
    status = (await household.ask("a", "status")).events[0]
    assert status["job"] == {"holder": "desk", "waiting_for": "desk"}
    if joined:
        await members["desk"].expect("ready", since=said)
    again = await household.start("desk", *arguments)
    await again.succeed()
    losses, undisturbed = _losses(holder, again), _losses(reference)
    missing = undisturbed.keys() - losses.keys()
    assert len(missing) <= 1, f"not told: {missing}"
    assert losses == {step: undisturbed[step] for step in losses}
    assert out.read_bytes() == kept.read_bytes()
    [plan] = again.events("plan")
    assert plan["reason"] == "failure"
    assert plan["epoch"] > holder.events("plan")[0]["epoch"]
    assert [e["for"] for e in members["a"].events("waiting")] == ["desk"]
    assert (await household.ask("a", "status")).events[0]["job"] is None
