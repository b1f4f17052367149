"""How much memory p2ptrain may use on this device.

The least of: what the system reports as available, what is left under every control group's limit
from this process's own group up to the root (containers, systemd slices; version 1 and 2), and what
is left under the process's own limits (`ulimit -v`). Memory of other programs, and what this
process already takes (torch, p2ptrain, an idle member), is not available and so is not counted
twice; files that the kernel only caches are available. A fifth stays free for other programs.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from p2ptrain.devices.drivers import CARD_MEMORY_TEXTS, MEMORY_TEXTS

USABLE_SHARE = 0.8

_NO_LIMIT_BYTES = 1 << 60

_TORCH_TEXTS = (
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "could not create a primitive",  # oneDNN: no memory to compile it, or for its scratchpad
    "can't start new thread",  # no room for its stack
    *MEMORY_TEXTS,
)
"""Of RuntimeErrors; those of processors were all seen under `ulimit -v`: convolutions, products, a
thread's start."""

_TORCH_CLASS = "OutOfMemoryError"
"""Of accelerators, whatever it says. This file loads no torch."""

_GROUPS = Path("/proc/self/cgroup")

_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """How one version of control groups names its files.

    Attributes:
        limits: in bytes, or "max"; the lowest counts.
        cached: rows of `memory.stat` whose bytes the kernel gives back before it kills.
    """

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


V2 = CgroupFiles(
    ("memory.max", "memory.high"),
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
)

V1 = CgroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def usable_memory_bytes() -> int:
    """Bytes that p2ptrain may plan with now."""
    return int(available_memory_bytes() * USABLE_SHARE)


def available_memory_bytes() -> int:
    """Bytes that this process could still take before something would be short of memory."""
    left = [int(psutil.virtual_memory().available), *_left_of_process_limits()]
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    left += left_under_groups(lines, _MOUNT)
    return max(min(left), 0)


def left_under_groups(lines: list[str], mount: Path) -> Iterator[int]:
    """What is left under each limit that binds a process.

    Args:
        lines: of its /proc/self/cgroup.
        mount: where the groups are mounted.
    """
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            for root in (mount, mount / "unified"):
                yield from _left(root, group, V2)
        elif "memory" in controllers.split(","):
            yield from _left(mount / "memory", group, V1)


def _left(root: Path, group: str, files: CgroupFiles) -> Iterator[int]:
    """Of the group and all groups around it.

    Inside a container the path may be one of the host, of which only the root can be seen.
    """
    inside = PurePosixPath(group.lstrip("/"))
    for place in (inside, *inside.parents):
        if ".." not in place.parts:
            left = _left_of_group(root / place, files)
            if left is not None:
                yield left


def _left_of_group(folder: Path, files: CgroupFiles) -> int | None:
    """None where that group limits nothing."""
    limits = [_number(folder / name) for name in files.limits]
    limit = min((n for n in limits if n is not None), default=_NO_LIMIT_BYTES)
    usage = _number(folder / files.usage)
    if limit >= _NO_LIMIT_BYTES or usage is None:
        return None
    return max(limit - max(usage - _cached_bytes(folder, files), 0), 0)


def _cached_bytes(folder: Path, files: CgroupFiles) -> int:
    try:
        rows = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    named = (row.partition(" ") for row in rows)
    return sum(int(value) for name, _, value in named if name in files.cached)


def _number(path: Path) -> int | None:
    try:
        content = path.read_text().strip()
    except OSError:  # no such limit here
        return None
    return int(content) if content.isdigit() else None


def _left_of_process_limits() -> Iterator[int]:
    """Of the address space (`ulimit -v`), where it is limited."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


def anonymous_bytes() -> int:
    """Memory of this process that is no file's, where the system reports it; else all of it."""
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had; torch raises a plain RuntimeError for it on a processor."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    is_named = any(kind.__name__ == _TORCH_CLASS for kind in type(error).__mro__)
    return is_named or any(text in str(error) for text in _TORCH_TEXTS)


def is_of_host(error: BaseException) -> bool:
    """Of an error that `is_out_of_memory`: the host had none, not an accelerator of its own.

    A driver that can pin no host memory says so with another class than torch's allocator.
    """
    is_named = any(kind.__name__ == _TORCH_CLASS for kind in type(error).__mro__)
    return not (is_named or any(text in str(error) for text in CARD_MEMORY_TEXTS))


def smaller_budget(memory_bytes: int, share: float) -> int:
    """A smaller budget than one that proved too large; what every process takes stays in it."""
    units = memory_bytes - PROCESS_BYTES
    return PROCESS_BYTES + int(share * units) if units > 0 else int(share * memory_bytes)


PROCESS_BYTES = 16 << 20
"""Of a process that trains, beside what its layers take: measured with 63 devices that export no
model, the median is 18 MiB, a plain MLP's 6 (docs/results/memory.md)."""
