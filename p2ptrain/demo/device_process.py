"""A `p2ptrain` command as a child process, observed through its `--json` events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from p2ptrain import events as ev
from p2ptrain.aio.tasks import end_program

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
    if kind is None:
        return None
    try:
        fields = dataclasses.fields(kind)
        return kind(**{f.name: _read(f, body[ev.name(f)]) for f in fields if _is_needed(f, body)})
    except (KeyError, TypeError):  # of a newer version of p2ptrain
        return None


def _is_needed(field: dataclasses.Field[Any], body: Mapping[str, Any]) -> bool:
    """Fields with a default were added later: an older version does not write them."""
    missing = dataclasses.MISSING
    required = field.default is missing and field.default_factory is missing
    return required or ev.name(field) in body


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    read = _NESTED.get(field.name)
    return value if read is None else read(value)


def _stage(body: Mapping[str, Any]) -> ev.PlanStage:
    first, end = body["units"]
    devices = tuple(ev.PlanDevice(d["name"], d["share"]) for d in body["devices"])
    return ev.PlanStage(
        units=(first, end),
        devices=devices,
        parameters=tuple(body["parameters"]),
        allocation=body.get("allocation", "samples"),
        warmup=body.get("warmup", 1),
    )


def _left_out(body: Mapping[str, Any]) -> ev.LeftOut:
    return ev.LeftOut(body["name"], body["reason"])


def _link(body: Mapping[str, Any]) -> ev.PlanLink:
    return ev.PlanLink(body["from"], body["to"], body["bytes_per_s"], body["latency_s"])


_NESTED: dict[str, Callable[[Any], Any]] = {
    "stages": lambda bodies: tuple(map(_stage, bodies)),
    "changes_results": tuple,
    "lrs": tuple,
    "left_out": lambda bodies: tuple(map(_left_out, bodies)),
    "links": lambda bodies: tuple(map(_link, bodies)),
}
