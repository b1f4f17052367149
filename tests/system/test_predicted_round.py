"""What `train` predicts of a round holds on real processes, cables and shares of a core.

The bounds are wide, as machines that run tests are busy.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tests.system.household import Device, Household
from tools.testbed import EmulatedDevice, Testbed

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "timed.py")
SHARES = 0.5, 0.3
STEPS, WARM_STEPS, BATCH_SIZE = 10, 2, 128
START_SECONDS = 120.0


@pytest.mark.usefixtures("emulation")
async def test_a_round_takes_about_as_long_as_predicted(tmp_path: Path) -> None:
    with Testbed.of_shares(SHARES, "1gbit") as testbed:
        own, other = testbed.devices
        emulated = {device.name: device for device in testbed.devices}
        async with Household(tmp_path, emulated=emulated, load=False) as household:
            await _started(household, other, "join")
            options = ("--wait-for", "2", "--planner", "pp", "--steps", str(STEPS))
            holder = await _started(household, own, "train", SCRIPT, *options)
            await holder.succeed(START_SECONDS)
    predicted = BATCH_SIZE / holder.events("plan")[0]["predicted_samples_per_s"]
    measured = median(step["seconds"] for step in holder.events("step")[WARM_STEPS:])
    assert 0.5 < predicted / measured < 2, (predicted, measured)


async def _started(
    household: Household, emulated: EmulatedDevice, command: str, *arguments: str
) -> Device:
    """With a whole core until it is ready."""
    emulated.lift()
    device = await household.start(emulated.name, command, *arguments, "--code", "24681357")
    await device.expect("ready", START_SECONDS)
    emulated.limit()
    return device
