"""What processes of their own are asked to do.

It stands by itself: a process that rests takes seconds to import more than this.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from p2ptrain.process.child_process_main import SLICE_SECONDS


def computed() -> tuple[float, float]:
    """Seconds of the processor, and of the clock, that computing takes."""
    started, ended = time.monotonic(), time.process_time() + 4 * SLICE_SECONDS
    while time.process_time() < ended:
        pass
    return 4 * SLICE_SECONDS, time.monotonic() - started


def only_in(process: int) -> int:
    """Kills every other process that calls it."""
    if os.getpid() != process:
        os._exit(1)
    return process


def opened(pipe: str) -> None:
    """Never returns; who reads `pipe` sees this process begin and end."""
    with Path(pipe).open("w") as here:
        here.write("here")
        here.flush()
        time.sleep(600)
