"""Processes on emulated devices that say JSON lines, waiting for what they say, what they spend.

The devices are changed by the same thread that waits, so this is plain blocking code: one reader
thread a pipe, one queue for everything that all processes of a cell say.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import IO, Any, Self

from tools.testbed import EmulatedDevice

ROOT = Path(__file__).resolve().parents[2]
STDERR_LINES = 2000
"""Kept of each process: with `--debug` it says when each phase was over."""
MOST_UNREAD = 100_000
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class CellError(RuntimeError):
    """A cell could not be measured; the run goes on with the next one."""


@dataclass(frozen=True, slots=True)
class Said:
    """One line of a process.

    Attributes:
        event: None when it has closed its stdout: it is ending.
    """

    process: Process
    event: dict[str, Any] | None

    def is_a(self, kind: str) -> bool:
        """Whether it says this kind of event."""
        return self.event is not None and self.event["event"] == kind


class Process:
    """One command on one device.

    Attributes:
        device: where it runs.
        said: its events so far.
        first_seconds: after its start, the first event of each kind.
    """

    def __init__(
        self, device: EmulatedDevice, arguments: Sequence[str], news: queue.Queue[Said]
    ) -> None:
        self.device = device
        self.said: list[dict[str, Any]] = []
        self.first_seconds: dict[str, float] = {}
        self._start_seconds = monotonic()
        self._news = news
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._process = device.popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C is the benchmark's to handle
        )
        readers = ((self._process.stdout, self._heard), (self._process.stderr, self._noted))
        self._readers = [
            threading.Thread(target=_read, args=reader, daemon=True) for reader in readers
        ]
        for thread in self._readers:
            thread.start()

    def tell(self, **fields: object) -> None:
        """One line on its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()

    def exit_code(self, within_seconds: float) -> int:
        """Wait for its end. Raises CellError."""
        try:
            code = self._process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            raise CellError(f"{self.device.name} did not end") from None
        for thread in self._readers:
            thread.join(within_seconds)
        return code

    @property
    def stderr(self) -> list[str]:
        """The last lines of its stderr."""
        return list(self._stderr)

    def end(self, within_seconds: float) -> None:
        """Ask it to leave (SIGTERM) and wait for its end. Raises CellError."""
        self._process.terminate()
        self.exit_code(within_seconds)

    def story(self) -> str:
        """The last thing that it said of an error."""
        errors = [event["message"] for event in self.said if event["event"] == "error"]
        return str(errors[-1]) if errors else "; ".join(list(self._stderr)[-3:])

    def _heard(self, line: str | None) -> None:
        event = json.loads(line) if line else None
        if event is not None:
            self.said.append(event)
            self.first_seconds.setdefault(event["event"], monotonic() - self._start_seconds)
        self._news.put(Said(self, event))

    def _noted(self, line: str | None) -> None:
        if line:
            self._stderr.append(line.rstrip())


def _read(pipe: IO[str], note: Callable[[str | None], None]) -> None:
    """Every line, then None."""
    with pipe:
        for line in pipe:
            note(line)
    note(None)


class Company:
    """The processes of one cell, with the time that they may take together.

    Args:
        limit_seconds: from now on, for everything that `expect_each` waits for.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._deadline = monotonic() + limit_seconds
        self._news: queue.Queue[Said] = queue.Queue(MOST_UNREAD)

    def start(self, device: EmulatedDevice, *arguments: str) -> Process:
        """Start `python ARGUMENTS...` on a device."""
        return Process(device, arguments, self._news)

    def start_lifted(self, starts: Sequence[tuple[EmulatedDevice, Sequence[str]]]) -> list[Process]:
        """Start one command a device, each with a whole core until it says `ready`."""
        for device, _ in starts:
            device.lift()
        processes = [self.start(device, *arguments) for device, arguments in starts]
        self.expect_each(processes, "ready", lambda process, _: process.device.limit())
        return processes

    def expect_each(
        self,
        processes: Sequence[Process],
        kind: str,
        then: Callable[[Process, dict[str, Any]], object] | None = None,
    ) -> list[dict[str, Any]]:
        """The first such event of each, in their order; `then` is called as each one comes.

        Raises:
            CellError: one says `error` or ends before, or the time is up.
        """
        found: dict[Process, dict[str, Any]] = {}
        for process in processes:
            for event in process.said:
                if event["event"] == kind and process not in found:
                    found[process] = event
        while len(found) < len(processes):
            said = self.next()
            if said.process not in processes:
                continue
            if said.event is None and said.process not in found:
                raise CellError(f"{said.process.device.name} ended: {said.process.story()}")
            if said.is_a(kind) and said.process not in found:
                assert said.event is not None
                found[said.process] = said.event
                if then is not None:
                    then(said.process, said.event)
        return [found[process] for process in processes]

    def next(self) -> Said:
        """The next line of any of them. Raises CellError: it is an error, or time is up."""
        left = self._deadline - monotonic()
        try:
            said = self._news.get(timeout=max(0.0, left))
        except queue.Empty:
            raise CellError(f"not done within {self._limit_seconds:.0f} s") from None
        if said.is_a("error"):
            assert said.event is not None
            raise CellError(f"{said.process.device.name}: {said.event['message']}")
        return said

    @property
    def seconds_left(self) -> float:
        """Until the time is up."""
        return max(0.0, self._deadline - monotonic())


SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of all devices at one moment."""

    seconds: float
    cpu_seconds: dict[str, float]
    sent_bytes: dict[str, int]

    @classmethod
    def now(cls, devices: Sequence[EmulatedDevice]) -> Reading:
        """Read them."""
        return cls(
            seconds=perf_counter(),
            cpu_seconds={device.name: device.cpu_seconds() for device in devices},
            sent_bytes={device.name: device.sent_bytes() for device in devices},
        )

    def until(self, end: Reading) -> dict[str, Any]:
        """What was spent from this moment to `end`."""
        return {
            "wall_seconds": end.seconds - self.seconds,
            "cpu_seconds": {
                name: spent - self.cpu_seconds[name] for name, spent in end.cpu_seconds.items()
            },
            "sent_bytes": {
                name: sent - self.sent_bytes[name] for name, sent in end.sent_bytes.items()
            },
        }


class MemoryWatch:
    """The most anonymous memory of each device, looked at twice a second, in a context."""

    def __init__(self, devices: Sequence[EmulatedDevice]) -> None:
        self._devices = devices
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = {device.name: 0 for device in devices}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            for device in self._devices:
                now = device.anonymous_bytes_now()
                self.peak_bytes[device.name] = max(self.peak_bytes[device.name], now)
