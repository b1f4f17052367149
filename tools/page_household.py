"""Three real devices on this machine that train, for the tools that look at the page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2ptrain.demo.device_process import DeviceProcess
from p2ptrain.mesh.trust.pairing_window import new_code

HOLDER = "study-desktop"

MEMBERS = ("kitchen-laptop", "old-notebook")

OWN = ("--interface", "127.0.0.1", "--threads", "1", "--device", "cpu")

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass
class TrainingDevice:
    """A process and what it has said."""

    process: DeviceProcess
    said: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        """Until it ends."""
        async for event in self.process.events():
            self.said.append(event)
            self.news.set()
        self.news.set()

    @property
    def steps(self) -> int:
        """Updates that it has reported."""
        return max((event.get("step", 0) for event in self.said[-64:]), default=0)

    async def until(self, step: int) -> None:
        """Wait for that step. Raises RuntimeError: it ended before."""
        while self.steps < step:
            if self.process.exit_code is not None:
                raise RuntimeError("\n".join(self.process.stderr))
            self.news.clear()
            await self.news.wait()


@dataclass
class TrainingHousehold:
    """Its devices by name."""

    folder: Path
    devices: dict[str, TrainingDevice] = field(default_factory=dict)

    async def start(self, name: str, *arguments: str) -> None:
        """Start `p2ptrain ARGUMENTS...` as that device."""
        process = await DeviceProcess.start(
            name, [*arguments, "--state-dir", str(self.folder / name)], environment=ENVIRONMENT
        )
        self.devices[name] = TrainingDevice(process)
        asyncio.create_task(self.devices[name].read(), name=f"read {name}")  # noqa: RUF006

    async def train(self, script: Sequence[str], *more: str) -> None:
        """Start `p2ptrain train SCRIPT` on the device with the data."""
        wait = ("--wait-for", str(1 + len(MEMBERS)))
        await self.start(HOLDER, "train", *script, "--name", HOLDER, *OWN, *wait, *more)

    async def page(self, name: str) -> str:
        """The address of its page."""
        command = ["page", "--no-browser", "--state-dir", str(self.folder / name)]
        asked = await DeviceProcess.start("page", command)
        found = [event async for event in asked.events()]
        if await asked.wait():
            raise RuntimeError("\n".join(asked.stderr))
        return str(found[0]["url"])

    @property
    def holder(self) -> TrainingDevice:
        """The device with the data."""
        return self.devices[HOLDER]


@contextlib.asynccontextmanager
async def training(folder: Path, script: Sequence[str]) -> AsyncIterator[TrainingHousehold]:
    """The three train `script` (with its options) on loopback, until the context ends."""
    household = TrainingHousehold(folder)
    code = ("--code", new_code())
    try:
        for name in MEMBERS:
            await household.start(name, "join", "--name", name, *OWN, *code)
        await household.train(script, *code)
        yield household
    finally:
        await asyncio.gather(*(device.process.stop() for device in household.devices.values()))
