"""Control groups of version 2: one folder, whose parent passes the controllers on."""

from __future__ import annotations

import os
from pathlib import Path

from tools.testbed.control_groups.control_group import ControlGroup, write, write_burst
from tools.testbed.errors import TestbedError
from tools.testbed.quota import Quota

_CONTROLLERS = ("cpu", "memory")
_MOST_WEIGHT = 10_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
