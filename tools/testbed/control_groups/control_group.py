"""What a testbed needs of a control group, and what both versions do alike.

Every write is checked by reading it back: the kernel rounds some values and ignores some others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tools.testbed.errors import TestbedError
from tools.testbed.quota import Quota

_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
"""The kernel offers no file descriptor to wait on in version 1."""


class ControlGroup(ABC):
    """One device's processes: their share of a core, their memory, their life."""

    name: str

    @abstractmethod
    def folders(self) -> list[Path]:
        """The group's folders, one a hierarchy; a process belongs to all or to none."""

    @abstractmethod
    def set_quota(self, quota: Quota) -> None:
        """Processor time from now on, ahead of whatever else the machine does."""

    @abstractmethod
    def set_memory(self, limit_bytes: int | None) -> None:
        """Memory from now on, without swap; None: no limit.

        Raises:
            TestbedError: more is in use (version 1; version 2 kills for it).
        """

    @abstractmethod
    def freeze(self) -> None:
        """Stop every process where it is, and return when all stand still."""

    @abstractmethod
    def thaw(self) -> None:
        """Undo `freeze`."""

    @abstractmethod
    def cpu_seconds(self) -> float:
        """Processor time that its processes, also those that ended, have used."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory in use, with the files it has read that the kernel still keeps."""

    @abstractmethod
    def memory_peak_bytes(self) -> int:
        """The most that `memory_bytes` has been."""

    @abstractmethod
    def anonymous_bytes(self) -> int:
        """Memory in use that is no file's: heaps and stacks."""

    def make(self) -> None:
        """Create it."""
        for folder in self.folders():
            folder.mkdir(exist_ok=True)  # cpu and cpuacct may be one hierarchy under two names

    def remove(self) -> None:
        """Kill what is inside, and remove it."""
        self.kill()
        for folder in self.folders():
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def processes(self) -> list[int]:
        """The ids of all processes inside."""
        found: set[int] = set()
        for folder in self.folders():
            with contextlib.suppress(FileNotFoundError):
                found |= set(map(int, (folder / "cgroup.procs").read_text().split()))
        return sorted(found)

    def kill(self) -> None:
        """SIGKILL to every process inside; returns when none is left."""
        self._kill_once()
        with contextlib.suppress(FileNotFoundError):
            self.thaw()  # in version 1 a frozen process dies only then
        self._wait(self._is_empty, "its processes do not die")

    def _is_empty(self) -> bool:
        self._kill_once()  # one of them may have forked meanwhile
        return not self.processes()

    def _kill_once(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _wait(self, reached: Callable[[], bool], words: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not reached():
            if time.monotonic() > deadline:
                raise TestbedError(f"control group {self.name}: {words}")
            time.sleep(_POLL_SECONDS)


def write(file: Path, value: str, expected: str | None = None) -> None:
    """Write to a control file; `expected` is what it says then, where that is not `value`.

    Raises:
        TestbedError: it says something else.
    """
    file.write_text(value)
    found = file.read_text().strip()
    if found != (value if expected is None else expected):
        raise TestbedError(f"{file} did not take {value!r}, it says {found!r}")


def write_burst(file: Path, microseconds: int) -> None:
    """Write a quota's burst. Raises TestbedError on kernels before 5.14, which know none."""
    if not file.exists():
        raise TestbedError(
            "this kernel knows no burst of a quota (5.14 does): shares would not hold"
        )
    write(file, str(microseconds))
