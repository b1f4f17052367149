"""The commands start, train and leave where Unix's names are missing (`windows_like.py`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from p2ptrain.demo.household import DeviceProcess
from tests.system.household import ENVIRONMENT, Device
from tools.testbed.network import private_network

pytestmark = [pytest.mark.household, pytest.mark.timeout(240)]

PROGRAM = (sys.executable, str(Path(__file__).with_name("windows_like.py")))
SCRIPT = str(Path(__file__).parent / "jobs" / "small.py")
ENVIRONMENT_THERE = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}


@asynccontextmanager
async def _started(name: str, *arguments: str, prefix: list[str]) -> AsyncIterator[Device]:
    process = await DeviceProcess.start(
        name, arguments, prefix=prefix, program=PROGRAM, environment=ENVIRONMENT_THERE
    )
    device = Device(process)
    try:
        yield device
    finally:
        await device.close()


async def test_a_household_trains_and_leaves_without_unix(tmp_path: Path) -> None:
    """The weights replace a file, and Ctrl-Break is what a closed window is elsewhere."""
    out = tmp_path / "weights.safetensors"
    out.write_bytes(b"older")

    def own(name: str) -> tuple[str, ...]:
        folder = str(tmp_path / name)
        return ("--name", name, "--code", "27182818", "--state-dir", folder, "--threads", "1")

    train = ("train", SCRIPT, "--wait-for", "2", "--planner", "pp", "--out", str(out))
    with private_network() as prefix:
        async with (
            _started("desk", "join", *own("desk"), prefix=prefix) as desk,
            _started("holder", *train, *own("holder"), prefix=prefix) as holder,
        ):
            said = await holder.succeed()
            assert [event["step"] for event in said if event["event"] == "step"]
            assert out.read_bytes() != b"older"
            os.kill(desk.pid, signal.SIGUSR2)  # SIGBREAK there
            assert (await desk.succeed())[-1] == {"event": "stopped"}
