"""What the system and drivers say of cards, without torch, which may not see them."""

from __future__ import annotations

import re
from pathlib import Path

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

AMD_DRIVER = Path("/sys/module/amdgpu")
"""Also of graphics in AMD's processors: no sign of a card."""

INTEL_ERROR = "UR_RESULT_ERROR"
"""What Intel's driver reports reaches Python as a RuntimeError with such a word in it."""

CARD_MEMORY_TEXTS = (
    "STATUS_ALLOC_FAILED",  # of CUDA's libraries
    f"{INTEL_ERROR}_OUT_OF_DEVICE_MEMORY",
    f"{INTEL_ERROR}_OUT_OF_RESOURCES",
)
"""In errors: a card has no memory left."""

MEMORY_TEXTS = (*CARD_MEMORY_TEXTS, "out of memory", f"{INTEL_ERROR}_OUT_OF_HOST_MEMORY")
"""In errors: a card, or its host, has none left."""


def nvidia_release(file: Path = NVIDIA_DRIVER) -> str:
    """Such as "driver 550.54.15"; the system may not say which."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return "driver of unknown version"
    match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return f"driver {match[1]}" if match is not None else "driver of unknown version"
