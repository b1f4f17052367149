"""`p2ptrain demo` as people run it: its last line, its exit code, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.household, pytest.mark.timeout(300)]


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A demo that runs, started in an empty folder."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2ptrain", "demo"),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    async for line in process.stdout:
        yield line.decode().rstrip()


def _devices(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def _runs(process: psutil.Process) -> bool:
    """An orphan that has ended may wait for ever for a first process that collects it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _left_behind(folder: Path) -> list[Path]:
    """State folders; torch's own folder for compiled code stays, as after any use of torch."""
    return [path for path in folder.iterdir() if path.name.startswith("p2ptrain")]


async def test_three_devices_train_one_dies_and_the_last_line_is_the_accuracy(
    demo: asyncio.subprocess.Process, tmp_path: Path
) -> None:
    lines = [line async for line in _lines(demo)]
    assert await demo.wait() == 0
    words, accuracy = lines[-1].rsplit(maxsplit=1)
    assert words == "test accuracy"
    assert 0.97 <= float(accuracy) <= 1
    stages = [line for line in lines if line.startswith("  ") and ": layer" in line]
    assert len({line.partition(":")[0] for line in stages}) >= 3
    killed = next(number for number, line in enumerate(lines) if "is killed now" in line)
    dead = lines[killed].split()[1]
    after = lines[killed:]
    assert [line for line in after if dead in line and "Lost" in line]
    assert len([line for line in lines if " plan" in line and "pieces" in line]) == 2
    (plan,) = [number for number, line in enumerate(after) if line.startswith("New plan")]
    stages = [line for line in after[plan:] if line.startswith("  ") and ": layer" in line]
    assert stages
    assert not [line for line in stages if dead in line]
    assert [line for line in after[plan:] if line.startswith("step ")]
    assert not _left_behind(tmp_path)


async def test_ctrl_c_ends_every_device(demo: asyncio.subprocess.Process, tmp_path: Path) -> None:
    devices: list[psutil.Process] = []
    async for line in _lines(demo):
        if line.startswith("step "):
            devices = _devices(demo)
            demo.send_signal(signal.SIGINT)
            break
    _, stderr = await demo.communicate()
    assert demo.returncode == 130
    assert stderr.decode().splitlines()[-1] == "p2ptrain: interrupted"
    assert len(devices) >= 3
    assert not [device for device in devices if _runs(device)]
    assert not _left_behind(tmp_path)
