"""A household of several devices on one machine: real processes, discovery, pairing and TLS.

Each device is a `p2ptrain` command as a child process, observed through its `--json` events.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from p2ptrain import events as ev
from p2ptrain.aio.tasks import end_program
from p2ptrain.control.server import sweep
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


LINE_LIMIT_BYTES = 16 * 1024 * 1024
"""A plan names every parameter of the model on one line."""

STDERR_LINES = 40
"""Lines kept of what the process says on stderr, for the error when it fails."""

STOP_SECONDS = 10.0
"""A device that leaves moves its work away first; then it is killed."""


class DeviceProcess:
    """One running command.

    Attributes:
        name: shown to users.
        stderr: the last lines it wrote there.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._process = process
        self._stderr_task = asyncio.create_task(self._read_stderr(), name=f"stderr of {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "p2ptrain"),
        environment: Mapping[str, str] | None = None,
    ) -> DeviceProcess:
        """Start `p2ptrain ARGUMENTS... --json`, behind `prefix` (such as `nsenter ...`)."""
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *program,
            *arguments,
            "--json",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,  # Ctrl-C on our terminal is ours to handle, in order
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Its events as they come, until it closes its stdout. Use once."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield json.loads(line)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code (negative: the signal that killed it)."""
        exit_code = await self._process.wait()
        await self._stderr_task
        return exit_code

    def signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self) -> int:
        """Ask it to leave, kill it if it does not; returns the exit code."""
        await end_program(self._process, STOP_SECONDS, self.wait)
        return await self.wait()

    async def kill(self) -> int:
        """Kill it, as a power cut would."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self.wait()

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self.stderr.append(line.decode(errors="replace").rstrip())


_KINDS: dict[str, type[ev.Event]] = {kind.event: kind for kind in ev.Event.__subclasses__()}


def parse_event(body: Mapping[str, Any]) -> ev.Event | None:
    """The event that `to_json` made `body` from; None for a kind or a shape unknown here."""
    kind = _KINDS.get(str(body.get("event")))
    try:
        found: ev.Event | None = None if kind is None else _read(kind, body)
    except (KeyError, TypeError):  # of a newer version of p2ptrain
        return None
    return found


def _read(kind: Any, body: Any) -> Any:
    """`body` as a `kind`: one of the dataclasses of events, several of them, or as it is."""
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], one) for one in body)
    if not dataclasses.is_dataclass(kind):
        return body
    kinds, missing = get_type_hints(kind), dataclasses.MISSING
    make: Any = kind
    return make(
        **{
            field.name: _read(kinds[field.name], body[ev.name(field)])
            for field in dataclasses.fields(kind)
            # one with a default was added later: an older version does not write it
            if ev.name(field) in body or field.default is field.default_factory is missing
        }
    )
