"""A model that one device cannot hold trains on three of the same memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.system.household import Device, Household
from tools.testbed import Testbed

pytestmark = [pytest.mark.namespaces, pytest.mark.household, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parent / "jobs" / "deep.py")
CODE = "48151623"
LIMIT_BYTES = 800 << 20
LARGE = ("width=2048", "samples=64", "batch_size=16", "micro_batch=4", "adam=true")
JOB = (SCRIPT, *(word for option in LARGE for word in ("-o", option)), "--steps", "4")


@pytest.mark.usefixtures("emulation")
async def test_three_devices_train_what_one_has_no_memory_for(tmp_path: Path) -> None:
    with Testbed.of_shares((0.45, 0.45, 0.45), "1gbit") as testbed:
        for device in testbed.devices:
            device.lift()
        names = [device.name for device in testbed.devices]
        prefixes = {device.name: device.prefix() for device in testbed.devices}
        prefixes["alone"] = prefixes[names[1]]
        for device in testbed.devices[1:]:
            device.set_memory(LIMIT_BYTES)
        async with Household(tmp_path, prefixes) as household:
            reference = await household.start(names[0], "train", *JOB, "--local")
            alone = await household.start("alone", "train", *JOB, "--local")
            await asyncio.gather(reference.succeed(), _fails(alone))
            testbed.devices[0].set_memory(LIMIT_BYTES)
            losses = await _train(household, names)
    assert losses == _losses(reference)


async def _fails(alone: Device) -> None:
    """It says how much is missing, or the kernel ends it."""
    assert await alone.exit_code() != 0
    assert not alone.events("step")
    said = [event["message"] for event in alone.events("error")]
    assert not said or "missing" in said[0], said


async def _train(household: Household, names: list[str]) -> list[float]:
    """All start at once: they pair in any order."""
    wait = ("--wait-for", "3", "--code", CODE, "--planner", "pp")
    holder, *_ = await asyncio.gather(
        household.start(names[0], "train", *JOB, *wait),
        *(household.start(name, "join", "--code", CODE) for name in names[1:]),
    )
    await holder.succeed()
    assert len(holder.events("plan")[-1]["stages"]) == 3
    return _losses(holder)


def _losses(device: Device) -> list[float]:
    return [said["loss"] for said in device.events("step")]
