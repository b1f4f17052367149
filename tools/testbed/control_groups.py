"""A device's control groups (Linux cgroups), version 1 or 2, whichever this machine has.

A quota of 0.2 core lets a device compute 1 ms of every 5, as a device a fifth as fast would over
any longer time. Over a shorter time it is faster: after a pause it finds a whole quota and what it
saved (the burst), and 2 ms of work may take 2 ms instead of 10. So quotas are as short as the
kernel allows, and a comparison with slower devices needs work of tens of milliseconds. The burst
makes up for a CPU that another device held while this one's turn came: with it, and with the
metronome, every device reaches its share also when all compute (`tests/system/full_load.py`).

Every write is checked by reading it back: the kernel rounds some values and ignores some others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.testbed.errors import TestbedError

ROOT = Path("/sys/fs/cgroup")
LEAST_QUOTA_MICROSECONDS = 1_000
"""The kernel takes no less, neither as a quota nor as a period."""


@dataclass(frozen=True, slots=True)
class Quota:
    """So many microseconds of processor time in every period; `microseconds` None: no limit.

    Attributes:
        burst_microseconds: of earlier periods' unused quota that may be used late.
    """

    microseconds: int | None
    period_microseconds: int
    burst_microseconds: int

    @classmethod
    def of_share(cls, share: float) -> Quota:
        """The quota whose processor time is `share` of one core (0.001 to 1) to 0.05%."""
        if share >= 1:
            return cls(None, LEAST_QUOTA_MICROSECONDS, 0)
        quota = LEAST_QUOTA_MICROSECONDS
        return cls(quota, round(quota / share), quota)


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


_HIERARCHIES = ("cpu", "cpuacct", "memory", "freezer")
_MOST_SHARES = 262_144
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT_BYTES = (2**63 - 1) // _PAGE_BYTES * _PAGE_BYTES


class ControlGroupVersion1(ControlGroup):
    """One folder in each of the four hierarchies."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self._root = root
        self._cpu, self._accounting, self._memory, self._freezer = self.folders()

    def folders(self) -> list[Path]:
        """See `ControlGroup`."""
        return [self._root / hierarchy / self.name for hierarchy in _HIERARCHIES]

    def set_quota(self, quota: Quota) -> None:
        """See `ControlGroup`."""
        write(self._cpu / "cpu.shares", str(_MOST_SHARES))
        limit = self._cpu / "cpu.cfs_quota_us"
        write_burst(self._cpu / "cpu.cfs_burst_us", 0)  # the old burst, quota, period must
        write(limit, "-1")  # not meet the new ones
        write(self._cpu / "cpu.cfs_period_us", str(quota.period_microseconds))
        write(limit, "-1" if quota.microseconds is None else str(quota.microseconds))
        write_burst(self._cpu / "cpu.cfs_burst_us", quota.burst_microseconds)

    def set_memory(self, limit_bytes: int | None) -> None:
        """See `ControlGroup`."""
        with_swap = self._memory / "memory.memsw.limit_in_bytes"  # not on every kernel
        if with_swap.exists():  # never below the limit without swap, so out of the way first
            write(with_swap, "-1", str(_NO_LIMIT_BYTES))
        self._set_limit(self._memory / "memory.limit_in_bytes", limit_bytes)
        if with_swap.exists():
            self._set_limit(with_swap, limit_bytes)

    def _set_limit(self, file: Path, limit_bytes: int | None) -> None:
        if limit_bytes is None:
            write(file, "-1", str(_NO_LIMIT_BYTES))
            return
        try:
            write(file, str(limit_bytes), str(limit_bytes // _PAGE_BYTES * _PAGE_BYTES))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise TestbedError(
                f"control group {self.name}: {self.memory_bytes()} bytes are in use, "
                f"more than the {limit_bytes} it is to have"
            ) from error

    def freeze(self) -> None:
        """See `ControlGroup`."""
        state = self._freezer / "freezer.state"
        state.write_text("FROZEN")  # it may say FREEZING for a moment
        self._wait(lambda: state.read_text().strip() == "FROZEN", "does not freeze")

    def thaw(self) -> None:
        """See `ControlGroup`."""
        write(self._freezer / "freezer.state", "THAWED")

    def cpu_seconds(self) -> float:
        """See `ControlGroup`."""
        return _number(self._accounting / "cpuacct.usage") / 1e9

    def memory_bytes(self) -> int:
        """See `ControlGroup`."""
        return _number(self._memory / "memory.usage_in_bytes")

    def memory_peak_bytes(self) -> int:
        """See `ControlGroup`."""
        return _number(self._memory / "memory.max_usage_in_bytes")

    def anonymous_bytes(self) -> int:
        """See `ControlGroup`."""
        lines = (self._memory / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["rss"])


def _number(file: Path) -> int:
    return int(file.read_text())


_CONTROLLERS = ("cpu", "memory")
_MOST_WEIGHT = 10_000


class ControlGroupVersion2(ControlGroup):
    """One folder below the root."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self._root = root
        self._folder = root / name

    def folders(self) -> list[Path]:
        """See `ControlGroup`."""
        return [self._folder]

    def make(self) -> None:
        """See `ControlGroup`. Raises TestbedError where the root keeps a controller to itself."""
        passed_on = self._root / "cgroup.subtree_control"
        for controller in _CONTROLLERS:
            if controller in passed_on.read_text().split():
                continue
            try:
                passed_on.write_text(f"+{controller}")
            except OSError as error:
                raise TestbedError(
                    f"{passed_on} does not take {controller} ({error.strerror}); in a container, "
                    "give it a control group namespace of the host (docker: --cgroupns=host)"
                ) from error
        super().make()

    def set_quota(self, quota: Quota) -> None:
        """See `ControlGroup`."""
        write(self._folder / "cpu.weight", str(_MOST_WEIGHT))
        limit = "max" if quota.microseconds is None else str(quota.microseconds)
        write_burst(self._folder / "cpu.max.burst", 0)  # the old burst must not meet the new quota
        write(self._folder / "cpu.max", f"{limit} {quota.period_microseconds}")
        write_burst(self._folder / "cpu.max.burst", quota.burst_microseconds)

    def set_memory(self, limit_bytes: int | None) -> None:
        """See `ControlGroup`."""
        swap = self._folder / "memory.swap.max"
        if swap.exists():  # not on kernels without swap
            write(swap, "0")
        whole_pages = (
            "max" if limit_bytes is None else str(limit_bytes // _PAGE_BYTES * _PAGE_BYTES)
        )
        write(self._folder / "memory.max", whole_pages)

    def freeze(self) -> None:
        """See `ControlGroup`."""
        write(self._folder / "cgroup.freeze", "1")
        self._wait(self._is_frozen, "does not freeze")

    def thaw(self) -> None:
        """See `ControlGroup`."""
        write(self._folder / "cgroup.freeze", "0")

    def cpu_seconds(self) -> float:
        """See `ControlGroup`."""
        return self._table("cpu.stat")["usage_usec"] / 1e6

    def memory_bytes(self) -> int:
        """See `ControlGroup`."""
        return int((self._folder / "memory.current").read_text())

    def memory_peak_bytes(self) -> int:
        """See `ControlGroup`. Raises TestbedError on kernels before 5.19."""
        peak = self._folder / "memory.peak"
        if not peak.exists():
            raise TestbedError("this kernel keeps no peak of a group's memory (5.19 does)")
        return int(peak.read_text())

    def anonymous_bytes(self) -> int:
        """See `ControlGroup`."""
        return self._table("memory.stat")["anon"]

    def _is_frozen(self) -> bool:
        return self._table("cgroup.events")["frozen"] == 1

    def _table(self, file: str) -> dict[str, int]:
        lines = (self._folder / file).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


def control_group(name: str, root: Path = ROOT) -> ControlGroup:
    """The group called `name`, which need not exist yet. Raises TestbedError."""
    if (root / "cpu" / "cpu.cfs_quota_us").exists():
        return ControlGroupVersion1(name, root)
    if (root / "cgroup.controllers").exists():
        return ControlGroupVersion2(name, root)
    raise TestbedError(f"no control groups under {root}: an emulated household needs them")
