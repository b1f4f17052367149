"""Control groups of version 1: a hierarchy for each thing that is controlled."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tools.testbed.control_groups.control_group import ControlGroup, write, write_burst
from tools.testbed.errors import TestbedError
from tools.testbed.quota import Quota

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
