"""How much memory p2ptrain may use on this device.

What the system says is available now, or what is left under the control group's limit (containers,
systemd slices; version 1 and 2) where that is less. A fifth stays free for the rest of the device,
for buffers and for the allocator's slack.
"""

from __future__ import annotations

from pathlib import Path

import psutil

USABLE_SHARE = 0.8
_NO_LIMIT_BYTES = 1 << 60
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def usable_memory_bytes() -> int:
    """Bytes that p2ptrain may plan with now."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in _cgroup_files():
        limit, usage = _read(limit_file), _read(usage_file)
        if limit is not None and usage is not None and limit < _NO_LIMIT_BYTES:
            available = min(available, max(limit - usage, 0))
    return int(available * USABLE_SHARE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had; torch raises a plain RuntimeError for it on the CPU."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text
    )


def _cgroup_files() -> list[tuple[Path, Path]]:
    """The limits of this process's own group and, inside containers, of the visible root."""
    pairs = [(Path(limit), Path(usage)) for limit, usage in _CGROUP_FILES]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        inside = group.lstrip("/")
        if controllers == "":
            root = Path("/sys/fs/cgroup") / inside
            pairs.append((root / "memory.max", root / "memory.current"))
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory") / inside
            pairs.append((root / "memory.limit_in_bytes", root / "memory.usage_in_bytes"))
    return pairs


def _read(path: Path) -> int | None:
    try:
        content = path.read_text().strip()
    except OSError:  # no such limit here
        return None
    return int(content) if content.isdigit() else None
