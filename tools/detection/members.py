"""Starts members, knows what they say, and breaks them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self

from tools.detection.member import Settings

SETTLE_SECONDS = 40.0
ROOT = Path(__file__).resolve().parent.parent.parent

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member runs.

    Attributes:
        prefix: what stands before its command.
    """

    host: str
    prefix: tuple[str, ...] = ()


class MemberProcess:
    """One running member.

    Attributes:
        said: its lines so far.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[], None]) -> None:
        self.said: list[Line] = []
        self._process = process
        self._on_line = on_line
        self._reading = asyncio.create_task(self._read(), name="lines of a member")

    def state(self, name: str) -> str | None:
        """What it last said of the member `name`."""
        lines = (line for line in reversed(self.said) if line["event"] == "member")
        return next((line["state"] for line in lines if line["name"] == name), None)

    @property
    def coordinator(self) -> tuple[str | None, int]:
        """Whom it follows, in which term."""
        lines = (line for line in reversed(self.said) if line["event"] == "coordinator")
        return next(((line["name"], line["term"]) for line in lines), (None, 0))

    def since(self, moment: float, event: str) -> list[Line]:
        """What it said of that kind since the moment, of the monotonic clock."""
        return [line for line in self.said if line["event"] == event and line["at"] >= moment]

    def signal(self, number: signal.Signals) -> float:
        """Send it a signal; returns the moment before."""
        moment = time.monotonic()
        os.kill(self._process.pid, number)
        return moment

    def freeze(self, how: str, seconds: float) -> None:
        """It does nothing for so long: `how` is "loop" or "gil"."""
        assert self._process.stdin is not None
        order = {"do": "freeze", "how": how, "seconds": seconds}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def end(self) -> None:
        """Kill it, whatever it does."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.said.append(json.loads(line))
            self._on_line()
        self._on_line()


class Members:
    """A household of member processes. `async with`; they are its items by name.

    Args:
        folder: for their state.
        places: one a member, or one for all.
        settings: `name`, `state_dir`, `host`, `port` and `peers` are filled in.
    """

    def __init__(self, folder: Path, count: int, places: Sequence[Place], settings: Settings):
        self.names = [chr(ord("a") + index) for index in range(count)]
        self._folder = folder
        self._places = dict(zip(self.names, cycle(places), strict=False))
        self._settings = settings
        self._ports = {name: _free_port() for name in self.names}
        self._processes: dict[str, MemberProcess] = {}
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        first = self.names[0]
        for name in self.names:
            await self.start(name)  # many at once from one address would be taken for a flood
            process = self[name]
            await self.until(
                lambda process=process, name=name: process.state(first) == "alive" or name == first,  # type: ignore[misc]
                SETTLE_SECONDS,
                f"{name} does not find {first}",
            )
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(process.end() for process in self._processes.values()))

    def __getitem__(self, name: str) -> MemberProcess:
        return self._processes[name]

    def others(self, *names: str) -> list[str]:
        """All but these."""
        return [name for name in self.names if name not in names]

    async def start(self, name: str) -> None:
        """Start it, or start it again, with the state folder and port it had."""
        place = self._places[name]
        first = self.names[0]
        peers = () if name == first else (f"{self._places[first].host}:{self._ports[first]}",)
        settings = replace(
            self._settings,
            name=name,
            state_dir=str(self._folder / name),
            host=place.host,
            port=self._ports[name],
            peers=peers,
        )
        process = await asyncio.create_subprocess_exec(
            *place.prefix,
            sys.executable,
            "-m",
            "tools.detection.member",
            settings.to_json(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._processes[name] = MemberProcess(process, self._beat)

    async def restart(self, name: str) -> None:
        """A new process, after the end of the old one."""
        await self._processes[name].end()
        await self.start(name)

    async def settled(self) -> None:
        """Wait until all see all alive and follow one coordinator."""
        await self.until(self._agree, SETTLE_SECONDS, "the members do not agree")

    async def until(self, reached: Callable[[], bool], seconds: float, words: str) -> None:
        """Wait for what some line makes true. Raises AssertionError."""
        try:
            async with asyncio.timeout(seconds):
                while not reached():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            last = {name: process.said[-6:] for name, process in self._processes.items()}
            raise AssertionError(f"{words} within {seconds} s: {last}") from None

    def _agree(self) -> bool:
        offices = {self[name].coordinator for name in self.names}
        alive = all(
            self[seer].state(name) == "alive" for seer in self.names for name in self.others(seer)
        )
        return alive and len(offices) == 1 and offices.pop()[0] in self.names

    def _beat(self) -> None:
        self._news.set()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
