"""A real device on battery hands its work over and rests, and is back once it is plugged in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from tests.system.household import Device, Household
from tests.system.sensed import turn
from tools.testbed import Testbed

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "deep.py")
CODE = "48151623"

SHARES = {"desk": 0.4, "laptop": 0.4}
"""Of a core."""

WITHIN_SECONDS = 10.0


@pytest.mark.usefixtures("emulation")
async def test_a_laptop_on_battery_leaves_and_comes_back_within_ten_seconds(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    cable = tmp_path / "cable.json"
    turn(cable, on_battery=False, battery=0.8)
    with Testbed.of_shares(tuple(SHARES.values())) as testbed:
        emulated = dict(zip(SHARES, testbed.devices, strict=True))
        for device in testbed.devices:
            device.lift()  # loading is not what this is about
        async with Household(tmp_path, emulated=emulated, load=False) as household:
            manners = ("--on-battery", "pause", "--code", CODE)
            laptop = await household.start("laptop", "join", *manners, sensors=cable)
            arguments = ("--wait-for", "2", "--code", CODE, "--planner", "pp")
            holder = await household.start("desk", "train", SCRIPT, *arguments)
            await holder.expect("step")
            for device in testbed.devices:
                device.limit()
            await holder.expect("step", since=len(holder.said) + 5)
            took = await _leaves_and_comes_back(household, holder, laptop, cable)
            holder.interrupt()
            assert await holder.exit_code() == 130
            losses = [step["loss"] for step in holder.events("step")]
            assert not holder.events("failure") + holder.events("recovered")
            assert not holder.events("warning")
    async with Household(tmp_path / "alone", load=False) as household:
        steps = ("--steps", str(len(losses)))
        reference = await household.start("alone", "train", SCRIPT, "--local", *steps)
        await reference.succeed()
        assert [step["loss"] for step in reference.events("step")] == losses
    record_property("seconds until it rested, and until it was back", took)
    assert max(took) < WITHIN_SECONDS, took


async def _leaves_and_comes_back(
    household: Household, holder: Device, laptop: Device, cable: Path
) -> tuple[float, float]:
    """In how many seconds."""
    turn(cable, on_battery=True, battery=0.8)
    unplugged_at = monotonic()
    left = await holder.expect("plan", reason="leave")
    assert _used(left) == {"desk"}
    await laptop.expect("condition", work="paused", sentence="paused: on battery")
    paused_seconds = monotonic() - unplugged_at
    await holder.expect("condition", name="laptop", work="paused", sentence="paused: on battery")
    await holder.expect("step", since=holder.said.index(left) + 2)
    status = (await household.ask("desk", "status", "--json")).events[0]
    (seen,) = [member for member in status["members"] if member["name"] == "laptop"]
    assert (seen["state"], seen["sentence"]) == ("alive", "paused: on battery")
    assert (seen["power"], seen["battery_percent"]) == ("battery", 80)
    turn(cable, on_battery=False, battery=0.8)
    plugged_at = monotonic()
    joined = await holder.expect("plan", reason="join")
    assert _used(joined) == {"desk", "laptop"}
    await holder.expect("step", since=holder.said.index(joined) + 5)
    back_seconds = monotonic() - plugged_at
    await laptop.expect("condition", since=1, work="full", sentence="")
    return paused_seconds, back_seconds


def _used(plan: dict[str, object]) -> set[str]:
    stages = plan["stages"]
    assert isinstance(stages, list)
    return {device["name"] for stage in stages for device in stage["devices"]}
