"""What the system says of drivers, without torch: there may be a card that torch does not see."""

from __future__ import annotations

import re
from pathlib import Path

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

AMD_DRIVER = Path("/sys/module/amdgpu")
"""Also of graphics in AMD's processors: no sign of a card."""


def nvidia_release(file: Path = NVIDIA_DRIVER) -> str:
    """Such as "driver 550.54.15"; the system may not say which."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return "driver of unknown version"
    match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return f"driver {match[1]}" if match is not None else "driver of unknown version"
