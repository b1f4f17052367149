"""Training in an emulated household goes on, at another speed, when the household changes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.clocks import Clocks
from tests.system.household import Device, Household
from tools.testbed import EmulatedDevice, Testbed
from tools.testbed import Household as EmulatedHousehold

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "small.py")
CODE = "48151623"
STEPS = 24
OPTIONS = ("-o", "epochs=100", "-o", "width=16", "--steps", str(STEPS))
CLOCKS = ((0, 0), (420, 86_400), (-900, 7_200), (86_400, 3_600))
"""Of each device: how far its wall clock and its uptime are ahead, in seconds."""


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    clocks = Clocks.compiled(tmp_path)
    if clocks is None:
        pytest.skip("wrong wall clocks need a C compiler")
    return clocks


def test_clocks_differ_as_they_say(clocks: Clocks) -> None:
    show = "import time, datetime as d; print(d.datetime.now().timestamp(), time.monotonic())"
    command = [sys.executable, "-c", show]
    plain, ahead = (
        list(map(float, subprocess.check_output([*prefix, *command]).split()))
        for prefix in ([], clocks.prefix(-900, 7_200))
    )
    assert ahead[0] - plain[0] == pytest.approx(-900, abs=5)
    assert ahead[1] - plain[1] == pytest.approx(7_200, abs=5)


@pytest.mark.usefixtures("emulation")
async def test_a_link_100_times_slower_and_wrong_clocks_fail_nobody(
    clocks: Clocks, tmp_path: Path
) -> None:
    with Testbed(EmulatedHousehold.load("D")) as testbed:
        await _train(testbed, clocks, tmp_path)


async def _train(testbed: Testbed, clocks: Clocks, folder: Path) -> None:
    prefixes = {
        device.name: [*device.prefix(), *clocks.prefix(*offsets)]
        for device, offsets in zip(testbed.devices, CLOCKS, strict=True)
    }
    async with Household(folder, prefixes, load=False) as household:
        holder_device, *others = testbed.devices
        for device in testbed.devices:
            device.lift()
        members = await asyncio.gather(
            *(household.start(device.name, "join", "--code", CODE) for device in others)
        )
        wait = ("--wait-for", "4", "--code", CODE, "--planner", "pp")
        holder = await household.start(holder_device.name, "train", SCRIPT, *OPTIONS, *wait)
        await holder.expect("plan")
        for device in testbed.devices:
            device.limit()
        await _slow_down(holder, others[1])
        await holder.succeed()
        for said in [*holder.said, *(said for member in members for said in member.said)]:
            assert said["event"] != "failure", said
            assert said.get("state") != "dead", said
        reference = await household.start("alone", "train", SCRIPT, *OPTIONS, "--local")
        await reference.succeed()
        assert _losses(holder) == _losses(reference)


async def _slow_down(holder: Device, device: EmulatedDevice) -> None:
    """A hundredth of its rate for some steps, which take longer together.

    Not each: after a pause the emulated link makes up for what it did not carry.
    """
    await holder.expect("step", step=6)
    device.set_rate(1)
    await holder.expect("step", step=10)
    device.set_rate(100)
    seconds = {said["step"]: said["seconds"] for said in holder.events("step")}
    slow = [seconds[step] for step in range(7, 11)]
    assert sum(slow) > 2 * len(slow) * min(seconds.values()), seconds


def _losses(device: Device) -> list[float]:
    return [said["loss"] for said in device.events("step")]
