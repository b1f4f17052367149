"""A cable that becomes a hundred times slower while a model trains over it: slower, not broken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.system.household import Device, Household
from tools.testbed.network import Network

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "wide.py")
CODE = "48151623"
SLOW_SECONDS = 8.0
"""A silent device is dead after 4 to 5 s."""
FAST_MBIT = 100.0


def _steps(device: Device) -> int:
    return len(device.events("step"))


@pytest.mark.parametrize(("count", "planner"), [(2, "pp"), (3, "dp")])
async def test_a_hundredfold_slower_link_is_no_failure(
    tmp_path: Path, count: int, planner: str
) -> None:
    """Neighbours of a group alone get data from the slow device: for all others it is silent."""
    with Network(count, f"{FAST_MBIT:g}mbit") as network:
        names = ["desk", "pi", "nas"][:count]
        prefixes = {name: network.prefix(number) for number, name in enumerate(names)}
        async with Household(tmp_path, prefixes, load=False) as household:
            members = [await household.start(name, "join", "--code", CODE) for name in names[1:]]
            for member in members:
                await member.expect("ready")
            wait = ("--wait-for", str(count), "--planner", planner, "--no-replan")
            holder = await household.start("desk", "train", SCRIPT, *wait, "--code", CODE)
            await holder.expect("step", step=3)
            said = {device: len(device.said) for device in (holder, *members)}
            network.cables[1].set_rate(FAST_MBIT / 100)
            await asyncio.sleep(SLOW_SECONDS)  # the condition itself: that long on a slow link
            slow = _steps(holder)
            network.cables[1].set_rate(FAST_MBIT)
            await holder.expect("step", step=slow + 3)
            for device, since in said.items():
                told = [event for event in device.said[since:] if event["event"] != "step"]
                changes = [
                    event for event in told if event["event"] not in ("member", "coordinator")
                ]
                assert changes == []
                assert "dead" not in [event.get("state") for event in told]
