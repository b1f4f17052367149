"""What is written to control groups of both versions, with plain files in the kernel's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.testbed.control_groups import (
    ControlGroup,
    ControlGroupVersion1,
    ControlGroupVersion2,
    Quota,
    control_group,
    write,
)
from tools.testbed.errors import TestbedError

MIB = 2**20


def _version2(root: Path) -> ControlGroup:
    (root / "cgroup.controllers").write_text("cpu memory")
    (root / "cgroup.subtree_control").write_text("cpu memory")
    group = control_group("pi", root)
    group.make()
    for file in ("cpu.max.burst", "memory.swap.max", "cgroup.procs"):
        (root / "pi" / file).write_text("")
    return group


def _version1(root: Path) -> ControlGroup:
    for hierarchy in ("cpu", "cpuacct", "memory", "freezer"):
        (root / hierarchy).mkdir()
    (root / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    group = control_group("pi", root)
    group.make()
    (root / "cpu" / "pi" / "cpu.cfs_burst_us").write_text("0")
    return group


def test_the_machine_s_version_is_found(tmp_path: Path) -> None:
    one, two, none = (tmp_path / name for name in ("one", "two", "none"))
    for folder in (one, two, none):
        folder.mkdir()
    assert isinstance(_version1(one), ControlGroupVersion1)
    assert isinstance(_version2(two), ControlGroupVersion2)
    with pytest.raises(TestbedError, match="no control groups"):
        control_group("pi", none)


def test_version_2_takes_share_memory_and_no_swap(tmp_path: Path) -> None:
    group = _version2(tmp_path)
    group.set_quota(Quota.of_share(0.4))
    assert (tmp_path / "pi" / "cpu.max").read_text() == "1000 2500"
    assert (tmp_path / "pi" / "cpu.max.burst").read_text() == "1000"
    group.set_quota(Quota.of_share(1.0))
    assert (tmp_path / "pi" / "cpu.max").read_text() == "max 1000"
    group.set_memory(64 * MIB + 1)
    assert (tmp_path / "pi" / "memory.max").read_text() == str(64 * MIB)
    assert (tmp_path / "pi" / "memory.swap.max").read_text() == "0"
    group.set_memory(None)
    assert (tmp_path / "pi" / "memory.max").read_text() == "max"


def test_version_2_counts(tmp_path: Path) -> None:
    group = _version2(tmp_path)
    folder = tmp_path / "pi"
    (folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\n")
    (folder / "memory.current").write_text("4096\n")
    (folder / "memory.stat").write_text("anon 2048\nfile 1024\n")
    assert group.cpu_seconds() == 1.5
    assert group.memory_bytes() == 4096
    assert group.anonymous_bytes() == 2048
    with pytest.raises(TestbedError, match=r"5\.19"):
        group.memory_peak_bytes()
    (folder / "memory.peak").write_text("8192\n")
    assert group.memory_peak_bytes() == 8192


def test_version_2_passes_on_what_the_root_has_kept(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    control_group("pi", tmp_path).make()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"


def test_version_1_takes_the_share(tmp_path: Path) -> None:
    group = _version1(tmp_path)
    group.set_quota(Quota.of_share(0.25))
    folder = tmp_path / "cpu" / "pi"
    assert (folder / "cpu.cfs_quota_us").read_text() == "1000"
    assert (folder / "cpu.cfs_period_us").read_text() == "4000"
    assert (folder / "cpu.cfs_burst_us").read_text() == "1000"


def test_a_kernel_without_bursts_is_refused(tmp_path: Path) -> None:
    group = _version1(tmp_path)
    (tmp_path / "cpu" / "pi" / "cpu.cfs_burst_us").unlink()
    with pytest.raises(TestbedError, match="no burst"):
        group.set_quota(Quota.of_share(0.25))


def test_a_write_that_says_something_else_afterwards_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "control"
    write(file, "1")
    with pytest.raises(TestbedError, match="did not take '2', it says '2'"):
        write(file, "2", "3")
