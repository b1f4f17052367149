"""Which kind of processor this device has, to tell devices of one kind from others."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
_TELLING = frozenset(
    ("model name", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
)
"""The first three on x86, the others on ARM; a chip of several kinds of cores lists all."""
MOST_LETTERS = 200


def _instructions() -> str:
    """Which instructions torch's kernels use here: less than the processor has, where told to."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    used = torch.backends.cpu.get_cpu_capability()
    return used if limit is None else f"{used} (oneDNN: {limit[:16]})"


def processor_kind(cpuinfo: Path = _CPUINFO) -> str:
    """With what else decides how much processor time a model takes: torch and its threads.

    Returns:
        "" where the system does not say: macOS and Windows name families of very unlike chips.
    """
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    told = {
        f"{name.strip()} {value.strip()}" for name, _, value in pairs if name.strip() in _TELLING
    }
    if not told:
        return ""
    software = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {_instructions()}"
    return f"{software}, {platform.machine()}, {', '.join(sorted(told))}"[:MOST_LETTERS]
