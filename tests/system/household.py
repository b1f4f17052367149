"""Devices as real processes, and a way to wait for what they say without ever sleeping.

async with Household(tmp_path) as household:
    laptop = await household.start("laptop", "join", "--code", CODE)
    await laptop.expect("ready", within_seconds=10)
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from p2ptrain.demo.household import DeviceProcess
from tests.system import forked
from tools.testbed import EmulatedDevice

EXPECT_SECONDS = 120.0
"""Nothing but a hang takes so long, also where the machine does other things at the same time. What
is to be fast is said by tests that measure it.
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

Event = dict[str, Any]


class Device:
    """A running command and everything it has said.

    Attributes:
        said: its events so far, in order.
        said_at: when they were read here, monotonic seconds.
    """

    def __init__(self, process: DeviceProcess) -> None:
        self.said: list[Event] = []
        self.said_at: list[float] = []
        self._process = process
        self._news = asyncio.Condition()
        self._ended = False
        self._reading = asyncio.create_task(self._read(), name=f"events of {process.name}")

    @property
    def name(self) -> str:
        """As the test called it; `ready` says how the household does."""
        return self._process.name

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def stderr(self) -> str:
        """The last lines of its stderr."""
        return "\n".join(self._process.stderr)

    def events(self, kind: str) -> list[Event]:
        """What it has said so far of one kind."""
        return [event for event in self.said if event["event"] == kind]

    async def expect(
        self,
        kind: str,
        within_seconds: float = EXPECT_SECONDS,
        since: int = 0,
        **fields: object,
    ) -> Event:
        """The first event of `kind` with these fields, past or future. Raises AssertionError.

        Args:
            since: so many events do not count (`len(device.said)` at some moment).
        """

        def wanted(event: Event) -> bool:
            return event["event"] == kind and fields.items() <= event.items()

        return await self.expect_that(wanted, f"{kind} {fields}", within_seconds, since)

    async def expect_that(
        self,
        wanted: Callable[[Event], bool],
        words: str,
        within_seconds: float = EXPECT_SECONDS,
        since: int = 0,
    ) -> Event:
        """The first event that `wanted` takes, past or future. Raises AssertionError."""

        def found() -> Event | None:
            return next(filter(wanted, self.said[since:]), None)

        try:
            async with asyncio.timeout(within_seconds), self._news:
                await self._news.wait_for(lambda: self._ended or found() is not None)
        except TimeoutError:
            raise AssertionError(self._story(f"not within {within_seconds} s: {words}")) from None
        event = found()
        if event is None:
            raise AssertionError(self._story(f"it ended without: {words}"))
        return event

    async def exit_code(self, within_seconds: float = EXPECT_SECONDS) -> int:
        """Wait for its end, and for its last words."""
        try:
            async with asyncio.timeout(within_seconds):
                exit_code = await self._process.wait()
                await self._reading
        except TimeoutError:
            raise AssertionError(self._story(f"still runs after {within_seconds} s")) from None
        return exit_code

    async def succeed(self, within_seconds: float = EXPECT_SECONDS) -> list[Event]:
        """Wait for its end, which must be exit code 0; returns everything it said."""
        exit_code = await self.exit_code(within_seconds)
        assert exit_code == 0, self._story(f"exit code {exit_code}")
        return self.said

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.signal(signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: it neither answers nor closes its connections."""
        self._process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: undo `freeze`."""
        self._process.signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, as a power cut."""
        await self._process.kill()

    async def close(self) -> None:
        """End it whatever it does."""
        self._process.signal(signal.SIGCONT)
        await self._process.kill()
        await self._reading

    async def _read(self) -> None:
        try:
            async for event in self._process.events():
                async with self._news:
                    self.said.append(event)
                    self.said_at.append(monotonic())
                    self._news.notify_all()
        finally:
            async with self._news:
                self._ended = True
                self._news.notify_all()

    def _story(self, words: str) -> str:
        said = "\n".join(f"  {event}" for event in self.said[-40:])
        return f"{self.name}: {words}\nit said:\n{said}\nstderr:\n{self.stderr}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command that ends by itself said."""

    exit_code: int
    events: list[Event]
    stderr: str


class Household:
    """Starts devices, each with a state folder of its own, and ends them all at the end.

    Args:
        folder: for the state folders; a device that is started again keeps its own.
        prefixes: name -> what stands before its commands (`Network.prefix`).
        prefix: the same for all other names.
        emulated: name -> the device of a testbed that it is; it needs no prefix.
        load: whether `join` and `train` load torch themselves, as people's do; otherwise they are
            forks of a process that has, where their prefix allows it.
    """

    def __init__(
        self,
        folder: Path,
        prefixes: Mapping[str, Sequence[str]] | None = None,
        prefix: Sequence[str] = (),
        *,
        emulated: Mapping[str, EmulatedDevice] | None = None,
        load: bool = True,
    ) -> None:
        self._folder = folder
        self._emulated = emulated or {}
        self._prefixes = prefixes or {}
        self._prefix = prefix
        self._load = load
        self._devices: list[Device] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(device.close() for device in self._devices))

    def state_dir(self, name: str) -> Path:
        """The state folder of the device that the test calls `name`."""
        return self._folder / f"state-{name}"

    async def start(
        self,
        name: str,
        command: str,
        *arguments: str,
        call: str = "",
        environment: Mapping[str, str] | None = None,
        sensors: Path | None = None,
    ) -> Device:
        """Start `join` or `train` with the device's name and state folder.

        Args:
            call: the `--name` to give, where it is not `name`.
            sensors: the file of what they say (`sensed.py`).
            environment: variables of its own, which it has from its first moment: it loads itself.
        """
        own = ("--name", call or name, "--threads", "1")
        load = self._load or environment is not None or sensors is not None
        sensed = () if sensors is None else ("tests.system.sensed", str(sensors))
        device = await self._start(
            name, command, *arguments, *own, environment=environment, load=load, sensed=sensed
        )
        self._devices.append(device)
        return device

    async def ask(self, name: str, command: str, *arguments: str) -> Answer:
        """Run a command that ends by itself (`status`, `remove` ...) on the device `name`."""
        device = await self._start(name, command, *arguments)
        self._devices.append(device)
        exit_code = await device.exit_code()
        return Answer(exit_code, device.said, device.stderr)

    async def _start(
        self,
        name: str,
        command: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        load: bool = True,
        sensed: Sequence[str] = (),
    ) -> Device:
        emulated = self._emulated.get(name)
        prefix = self._prefixes.get(name, self._prefix)
        start: Callable[..., Awaitable[DeviceProcess]] = DeviceProcess.start
        if emulated is not None and load:
            prefix = emulated.prefix()
        elif emulated is not None:
            prefix, start = emulated.cable.prefix(), partial(forked.start, emulated=emulated)
        elif not load and forked.can_enter(prefix):
            start = forked.start
        if sensed:
            start = partial(start, program=(sys.executable, "-m", *sensed))
        process = await start(
            name,
            [command, *arguments, "--state-dir", str(self.state_dir(name))],
            prefix=prefix,
            environment={**ENVIRONMENT, **(environment or {})},
        )
        return Device(process)


_ALONE: dict[tuple[str, ...], list[float]] = {}


async def losses_alone(household: Household, *job: str) -> list[float]:
    """Of a job on one device, by a process that trains it once for all tests."""
    if job not in _ALONE:
        reference = await household.start("alone", "train", *job, "--local")
        await reference.succeed()
        _ALONE[job] = [step["loss"] for step in reference.events("step")]
    return _ALONE[job]
