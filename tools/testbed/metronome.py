"""Makes the kernel's scheduler look twice a millisecond, so that shares of a core are exact.

The kernel notices that a quota is used up, and that another device's turn has come, at its timer
tick: every 4 ms at the usual 250 Hz. Devices that share a CPU then overrun a quota of 1 ms, wait
for one another, and what they could not use of theirs is lost: with every device computing, three
devices of 0.4 core got 0.31. Quotas of 4 ms would cure that, but let a device make up, after each
pause, for 20 ms of it, and so hide the bubbles that are to be measured.

So one thread a CPU, ahead of all others, sleeps half a millisecond at a time: each time that it
gives the CPU back, the scheduler accounts and chooses again. It takes 4% of a CPU.

    python metronome.py CPU
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Self

BEAT_SECONDS = 0.0005
_BEATS_A_LOOK = 500
_READY = "beats"


class Metronome:
    """Beats on these CPUs for as long as the context lasts.

    Raises:
        OSError: on entering, where real-time scheduling is not allowed.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = sorted(set(cpus))
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            for cpu in self._cpus:
                self._processes.append(_start(cpu))
            for process in self._processes:
                assert process.stdout is not None
                if process.stdout.readline().strip() != _READY:
                    raise OSError("real-time scheduling is not allowed here (CAP_SYS_NICE)")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def beat(cpu: int) -> None:
    """Beat on one CPU until the process that asked for it has ended."""
    parent = os.getppid()
    os.sched_setaffinity(0, [cpu])
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print(_READY, flush=True)
    sleep = time.sleep
    while os.getppid() == parent:
        for _ in range(_BEATS_A_LOOK):
            sleep(BEAT_SECONDS)


def _start(cpu: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(cpu)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the testbed, which stops this in its turn
    )


if __name__ == "__main__":
    beat(int(sys.argv[1]))
