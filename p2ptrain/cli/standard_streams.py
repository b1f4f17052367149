"""stdin, stdout and stderr are there, also where the parent process has closed some of them.

Without them Python has None as `sys.stdout`, and the next socket becomes file descriptor 1, into
which `--json` or a C library underneath would then write.
"""

from __future__ import annotations

import os
import sys


def complete() -> None:
    """Let the closed ones lead nowhere."""
    for number in (0, 1, 2):  # a new descriptor is the lowest that is free
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
