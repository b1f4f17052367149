"""Devices whose clocks differ, as those of real ones do.

The monotonic clock and the uptime of a process are the kernel's, in a time namespace of its own;
processes of one machine share them otherwise, which would hide a monotonic time that one device
sends and another compares with its own. The wall clock has no namespace: a small library in C
stands before the C library's (`native/wall_clock.c`).
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parent / "native" / "wall_clock.c"


@dataclass(frozen=True, slots=True)
class Clocks:
    """Makes commands run by clocks of their own."""

    library: Path

    @classmethod
    def compiled(cls, folder: Path) -> Clocks | None:
        """Compile the library into `folder`; None where there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            return None
        library = folder / "wall_clock.so"
        options = ("-shared", "-fPIC", "-O2", "-o", str(library))
        subprocess.run([compiler, *options, str(_SOURCE)], check=True, capture_output=True)
        return cls(library)

    def prefix(self, wall_seconds: int, uptime_seconds: int) -> list[str]:
        """What to put before a command: its wall clock is ahead by so much, and its uptime."""
        kernel = ("--monotonic", str(uptime_seconds), "--boottime", str(uptime_seconds))
        wall = (f"LD_PRELOAD={self.library}", f"WALL_CLOCK_OFFSET_SECONDS={wall_seconds}")
        return ["unshare", "--time", *kernel, "env", *wall]
