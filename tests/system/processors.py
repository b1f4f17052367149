"""Devices with a share of a core each, on one machine: Linux control groups, as root.

A quota of 0.2 core in periods of 10 ms lets a device compute 2 ms of every 10, as a device a fifth
as fast would over any longer time. The groups go before whatever else the machine does, as far as
their quotas reach. Both versions of control groups are known; every write is checked by reading it
back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_MICROSECONDS = 10_000
LEAST_QUOTA_MICROSECONDS = 1_000
_VERSION_1 = Path("/sys/fs/cgroup/cpu")
_VERSION_2 = Path("/sys/fs/cgroup")
_MOST_SHARES = 262_144
_MOST_WEIGHT = 10_000
_numbers = itertools.count()


class Processors:
    """One control group a share, for as long as the context lasts."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._root = _VERSION_1 if (_VERSION_1 / "cpu.cfs_quota_us").exists() else _VERSION_2
        self._tag = f"p2ptrain-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> Self:
        for device in range(len(self._shares)):
            self._group(device).mkdir()
            self.limit(device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for device in range(len(self._shares)):
            with contextlib.suppress(OSError):  # a process still ends: the group goes with reboot
                self._group(device).rmdir()

    def prefix(self, device: int) -> list[str]:
        """What to put before a command to run it with that device's share."""
        enter = f'echo $$ > {self._group(device)}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "--"]

    def lift(self, device: int) -> None:
        """Give the device a whole core for now, such as while it loads torch."""
        self._limit(self._group(device), 1.0)

    def limit(self, device: int) -> None:
        """Hold the device to its share."""
        self._limit(self._group(device), self._shares[device])

    def _group(self, device: int) -> Path:
        return self._root / f"{self._tag}-{device}"

    def _limit(self, group: Path, share: float) -> None:
        period = max(PERIOD_MICROSECONDS, int(LEAST_QUOTA_MICROSECONDS / share))
        quota = int(period * share)
        if self._root == _VERSION_1:
            _write(group / "cpu.shares", str(_MOST_SHARES))
            _write(group / "cpu.cfs_period_us", str(period))
            _write(group / "cpu.cfs_quota_us", str(quota))
        else:
            _write(group / "cpu.weight", str(_MOST_WEIGHT))
            _write(group / "cpu.max", f"{quota} {period}")


def _write(file: Path, value: str) -> None:
    file.write_text(value)
    if file.read_text().strip() != value:
        raise OSError(f"{file} did not take {value!r}")
