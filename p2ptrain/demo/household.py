"""A household of several devices on one machine: real processes, discovery, pairing and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from p2ptrain.control.server import sweep
from p2ptrain.demo.device_process import DeviceProcess
from p2ptrain.errors import UserError

T = TypeVar("T")

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Devices that share one machine's cores only disturb each other with more threads."""


@dataclass(frozen=True, slots=True)
class HouseholdPlan:
    """Who takes part, and what the holder trains.

    Attributes:
        members: names of the devices that only compute.
        holder: name of the device that has the data.
        code: what they pair with.
        folder: room for their state folders.
        train_arguments: SCRIPT and options of the holder's `train`.
        interface: what to find each other on; None for all.
        dies: name of the member whose process is killed on the way; None = no member's.
        dies_after: the step whose report it does not outlive.
    """

    members: Sequence[str]
    holder: str
    code: str
    folder: Path
    train_arguments: Sequence[str]
    interface: str | None = None
    dies: str | None = None
    dies_after: int = 0

    def arguments(self, name: str) -> list[str]:
        """The options that make `name` one of these devices."""
        folder = str(self.folder / name)
        own = ["--name", name, "--code", self.code, "--state-dir", folder]
        own += ["--threads", "1", "--device", "cpu"]
        return own if self.interface is None else [*own, "--interface", self.interface]


async def train_together(plan: HouseholdPlan) -> AsyncGenerator[dict[str, Any], None]:
    """Start all devices; yield the holder's events; leave no process behind, however it ends.

    Raises:
        UserError: a device failed that was not meant to; the message has its name and its words.
    """
    async with _DemoHousehold(plan) as household:
        members = [await household.start(name, "join") for name in plan.members]
        holder = await household.start(plan.holder, "train", *plan.train_arguments)
        for member in members:
            household.watch(member)
        events = holder.events()
        while (event := await household.until(anext(events, None))) is not None:
            yield event
            if plan.dies is not None and event.get("step") == plan.dies_after:
                await household.kill(plan.dies)
        await _expect_success(holder)


class _DemoHousehold:
    """Processes and the tasks that read what they say; leaving the context ends them all."""

    def __init__(self, plan: HouseholdPlan) -> None:
        self._plan = plan
        self._devices: list[DeviceProcess] = []
        self._watchers: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        await asyncio.gather(*(device.stop() for device in self._devices))

    async def start(self, name: str, command: str, *arguments: str) -> DeviceProcess:
        """Start the device `name`."""
        device = await DeviceProcess.start(
            name, [command, *arguments, *self._plan.arguments(name)], environment=ENVIRONMENT
        )
        self._devices.append(device)
        return device

    def watch(self, member: DeviceProcess) -> None:
        """Notice when `member` ends, which it should not."""
        task = asyncio.create_task(_watch(member), name=f"watch {member.name}")
        self._watchers[member.name] = task

    async def kill(self, name: str) -> None:
        """SIGKILL to a watched device, as a power cut; later calls change nothing."""
        watcher = self._watchers.pop(name, None)
        if watcher is None:
            return
        watcher.cancel()
        await asyncio.wait([watcher])
        await next(device for device in self._devices if device.name == name).kill()
        sweep(self._plan.folder / name)  # no device starts there again that would

    async def until(self, coming: Awaitable[T]) -> T:
        """The result of `coming`, unless a watched device ends before. Raises UserError."""
        waiting = asyncio.ensure_future(_awaited(coming))
        try:
            watchers = list(self._watchers.values())
            await asyncio.wait([waiting, *watchers], return_when=asyncio.FIRST_COMPLETED)
            for watcher in watchers:
                if watcher.done():
                    watcher.result()
            return await waiting
        finally:
            waiting.cancel()


async def _awaited(coming: Awaitable[T]) -> T:
    """`anext` gives an awaitable that is no coroutine, which tasks do not take."""
    return await coming


async def _watch(member: DeviceProcess) -> None:
    """Read what a member says, so that its pipe never fills. Raises UserError when it ends."""
    async for _ in member.events():
        pass
    await _expect_success(member)
    raise UserError(f"{member.name} ended before the training did")


async def _expect_success(device: DeviceProcess) -> None:
    exit_code = await device.wait()
    if exit_code != 0:
        words = device.stderr[-1] if device.stderr else "it said nothing"
        raise UserError(
            f"{device.name} ended with exit code {exit_code}: "
            f"{words.removeprefix('p2ptrain: error: ')}"
        )
