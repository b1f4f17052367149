"""Devices with a share of a core each, on one machine: Linux control groups, as root.

A quota of 0.2 core lets a device compute 1 ms of every 5, as a device a fifth as fast would over
any longer time. Over a shorter time it is faster: after a pause it finds a whole quota, and 2 ms of
work may take 2 ms instead of 10 (`tools/processor_share.py`). So periods are as short as the kernel
allows, and whoever compares times with those of slower devices times work of tens of milliseconds.

Every device has one CPU that it never leaves: a slice of its quota that one CPU holds is of no use
to its thread on another. The groups go before whatever else the machine does, as far as their
quotas reach. Both versions of control groups are known; every write is checked by reading it back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

LEAST_QUOTA_MICROSECONDS = 1_000
"""The kernel takes no less, neither as a quota nor as a period."""
_VERSION_1 = Path("/sys/fs/cgroup/cpu")
_VERSION_2 = Path("/sys/fs/cgroup")
_MOST_SHARES = 262_144
_MOST_WEIGHT = 10_000
_numbers = itertools.count()


class Processors:
    """One control group and one CPU a share, for as long as the context lasts.

    Raises:
        ValueError: a share is not of one core, or the machine has too few for all of them.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._places = places(shares, sorted(os.sched_getaffinity(0)))
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
        place = self._places[device]
        enter = f'echo $$ > {self._group(device)}/cgroup.procs && exec taskset -c {place} "$@"'
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
        quota = LEAST_QUOTA_MICROSECONDS
        period = round(quota / share)
        if self._root == _VERSION_1:
            _write(group / "cpu.shares", str(_MOST_SHARES))
            _write(group / "cpu.cfs_quota_us", "-1")  # else the old quota and the new period meet
            _write(group / "cpu.cfs_period_us", str(period))
            _write(group / "cpu.cfs_quota_us", str(quota if share < 1 else -1))
        else:
            _write(group / "cpu.weight", str(_MOST_WEIGHT))
            _write(group / "cpu.max", f"{quota if share < 1 else 'max'} {period}")


def places(shares: Sequence[float], cpus: Sequence[int]) -> list[int]:
    """The CPU of each share, the largest placed first, always where most is left.

    Raises:
        ValueError: a share is not above 0 and at most 1, or some CPU would be oversold.
    """
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares are of one core, above 0 and at most 1: {shares}")
    left = dict.fromkeys(cpus, 1.0)
    chosen: dict[int, int] = {}
    for device in sorted(range(len(shares)), key=lambda device: -shares[device]):
        cpu = max(left, key=left.__getitem__)
        left[cpu] -= shares[device]
        if left[cpu] < -1e-9:
            raise ValueError(f"{len(cpus)} CPUs cannot give {shares} of a core")
        chosen[device] = cpu
    return [chosen[device] for device in range(len(shares))]


def _write(file: Path, value: str) -> None:
    file.write_text(value)
    if file.read_text().strip() != value:
        raise OSError(f"{file} did not take {value!r}")
