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
SLOW_SECONDS = 20.0
FAST_MBIT, SLOW_MBIT = 100.0, 1.0


def _steps(device: Device) -> int:
    return len(device.events("step"))


async def test_a_hundredfold_slower_link_is_no_failure(tmp_path: Path) -> None:
    with Network(2, f"{FAST_MBIT:g}mbit") as network:
        prefixes = {"desk": network.prefix(0), "pi": network.prefix(1)}
        async with Household(tmp_path, prefixes, load=False) as household:
            member = await household.start("pi", "join", "--code", CODE)
            await member.expect("ready")
            arguments = ("--wait-for", "2", "--planner", "pp", "--no-replan", "--code", CODE)
            holder = await household.start("desk", "train", SCRIPT, *arguments)
            await holder.expect("step", step=3)
            said = {device: len(device.said) for device in (holder, member)}
            network.cables[1].set_rate(SLOW_MBIT)
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
