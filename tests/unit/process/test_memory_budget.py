"""What is left under control groups, from folders as the kernel shows them."""

from __future__ import annotations

import errno
from pathlib import Path

import torch

from p2ptrain.process.memory_budget import (
    USABLE_SHARE,
    available_memory_bytes,
    is_of_host,
    is_out_of_memory,
    left_under_groups,
    usable_memory_bytes,
)

MIB = 1 << 20


def v2(folder: Path, limit: str, used: int, cached: int = 0, high: str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")


def v1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {cached}\n")


def test_what_only_caches_files_is_free(tmp_path: Path) -> None:
    v2(tmp_path / "app", str(100 * MIB), used=60 * MIB, cached=20 * MIB)
    assert list(left_under_groups(["0::/app"], tmp_path)) == [60 * MIB]


def test_groups_around_ours_bind_too(tmp_path: Path) -> None:
    v2(tmp_path / "user" / "app", "max", used=10 * MIB)
    v2(tmp_path / "user", str(100 * MIB), used=90 * MIB)
    v2(tmp_path, str(500 * MIB), used=100 * MIB)
    assert list(left_under_groups(["0::/user/app"], tmp_path)) == [10 * MIB, 400 * MIB]


def test_a_soft_limit_is_a_limit(tmp_path: Path) -> None:
    v2(tmp_path / "app", str(100 * MIB), used=60 * MIB, high=str(70 * MIB))
    assert list(left_under_groups(["0::/app"], tmp_path)) == [10 * MIB]


def test_a_container_sees_its_own_root_whatever_the_hosts_path(tmp_path: Path) -> None:
    v2(tmp_path, str(100 * MIB), used=60 * MIB)
    assert list(left_under_groups(["0::/../../docker/abc"], tmp_path)) == [40 * MIB]


def test_version_1_counts_the_whole_hierarchy(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    v1(memory / "docker" / "abc", 200 * MIB, used=150 * MIB, cached=50 * MIB)
    v1(memory / "docker", 9223372036854771712, used=150 * MIB)
    lines = ["3:cpu,cpuacct:/docker/abc", "2:memory:/docker/abc"]
    assert list(left_under_groups(lines, tmp_path)) == [100 * MIB]


def test_more_than_the_limit_in_use_leaves_nothing(tmp_path: Path) -> None:
    v2(tmp_path / "app", str(100 * MIB), used=110 * MIB)
    assert list(left_under_groups(["0::/app"], tmp_path)) == [0]


def test_a_part_stays_free_on_this_machine() -> None:
    available = available_memory_bytes()
    assert 0 < usable_memory_bytes() <= available * (USABLE_SHARE + 0.1)


def test_torch_says_it_has_no_memory_in_its_own_words() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert is_out_of_memory(RuntimeError("can't start new thread"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(torch.OutOfMemoryError("of an accelerator"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    full = RuntimeError(
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
    )
    assert is_out_of_memory(full)
    assert not is_of_host(full)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
