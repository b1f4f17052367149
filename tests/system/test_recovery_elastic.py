"""Real processes come and leave while a job trains, and nothing in its losses shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.system.household import Device, Household
from tools.testbed import EmulatedDevice, Testbed

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "deep.py")
CODE = "48151623"


SHARES = {"desk": 0.3, "a": 0.1, "b": 0.3}
"""Of a core: so much that the third device pays, whatever else the machine does."""


@pytest.mark.usefixtures("emulation")
async def test_who_comes_later_is_taken_in_and_who_gets_sigterm_hands_its_work_over(
    tmp_path: Path,
) -> None:
    with Testbed.of_shares(tuple(SHARES.values())) as testbed:
        devices = dict(zip(SHARES, testbed.devices, strict=True))
        async with Household(tmp_path, emulated=devices, load=False) as household:
            losses = await _coming_and_leaving(household, devices)
    async with Household(tmp_path / "alone", load=False) as household:
        steps = ("--steps", str(len(losses)))
        reference = await household.start("alone", "train", SCRIPT, "--local", *steps)
        await reference.succeed()
        assert [step["loss"] for step in reference.events("step")] == losses


async def _coming_and_leaving(
    household: Household, devices: Mapping[str, EmulatedDevice]
) -> list[float]:
    """The losses until the holder is interrupted."""
    arguments = ("--wait-for", "2", "--code", CODE, "--planner", "pp")
    first = await _join(household, devices["a"], "a")
    devices["desk"].lift()
    holder = await household.start("desk", "train", SCRIPT, *arguments)
    await holder.expect("member")
    devices["desk"].limit()
    await holder.expect("step")
    await _join(household, devices["b"], "b")
    joined = await holder.expect("plan", reason="join")
    assert _used(joined) == {"desk", "a", "b"}
    await _goes_on(holder, joined)
    first.terminate()
    left = await holder.expect("plan", reason="leave")
    assert _used(left) == {"desk", "b"}
    await first.succeed()
    await _goes_on(holder, left)
    holder.interrupt()
    assert await holder.exit_code() == 130
    assert not holder.events("failure") + holder.events("recovered")
    assert [step["step"] for step in holder.events("step")] == list(
        range(1, len(holder.events("step")) + 1)
    )
    return [step["loss"] for step in holder.events("step")]


async def _join(household: Household, device: EmulatedDevice, name: str) -> Device:
    """A member, started at full speed: loading is not what this is about."""
    device.lift()
    member = await household.start(name, "join", "--code", CODE)
    await member.expect("ready")
    device.limit()
    return member


async def _goes_on(holder: Device, plan: dict[str, object]) -> None:
    """Steps are made under the plan."""
    await holder.expect("step", since=holder.said.index(plan) + 5)


def _used(plan: dict[str, object]) -> set[str]:
    stages = plan["stages"]
    assert isinstance(stages, list)
    return {device["name"] for stage in stages for device in stage["devices"]}
