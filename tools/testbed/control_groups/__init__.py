"""A device's control groups (Linux cgroups), version 1 or 2, whichever this machine has.

control_group.py    what a testbed needs of a group
version1.py         a group in each of four hierarchies: cpu, cpuacct, memory, freezer
version2.py         one group
"""

from __future__ import annotations

from pathlib import Path

from tools.testbed.control_groups.control_group import ControlGroup
from tools.testbed.control_groups.version1 import ControlGroupVersion1
from tools.testbed.control_groups.version2 import ControlGroupVersion2
from tools.testbed.errors import TestbedError

ROOT = Path("/sys/fs/cgroup")


def control_group(name: str, root: Path = ROOT) -> ControlGroup:
    """The group called `name`, which need not exist yet. Raises TestbedError."""
    if (root / "cpu" / "cpu.cfs_quota_us").exists():
        return ControlGroupVersion1(name, root)
    if (root / "cgroup.controllers").exists():
        return ControlGroupVersion2(name, root)
    raise TestbedError(f"no control groups under {root}: an emulated household needs them")


__all__ = ["ControlGroup", "control_group"]
