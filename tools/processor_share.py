"""How long work takes on an emulated device, beside a device that is slower. Needs root, Linux.

    python tools/processor_share.py --share 0.25

A control group's quota holds a device to its share of a core over seconds; a short piece of work
after a pause takes less than its share of the time would say. One line for each size of work: its
seconds on a whole core, on a device so much slower, and as measured after pauses of random length.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.testbed import Testbed  # noqa: E402

WORK_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
TRIALS = 20
PAUSE_OF_WORK = 0.66
"""Of the time that a slower device would work: it is busy for three fifths of its time."""
_BYTES = bytes(20_000)


def measure(share: float) -> list[float]:
    """In the device: mean seconds of each size of work."""
    draw = random.Random(0)
    return [
        statistics.mean(_trial(seconds, share, draw) for _ in range(TRIALS))
        for seconds in WORK_SECONDS
    ]


def _trial(seconds: float, share: float, draw: random.Random) -> float:
    time.sleep(draw.uniform(0.5, 1.5) * PAUSE_OF_WORK * seconds / share)
    started, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < seconds:
        hashlib.sha256(_BYTES).digest()
    return time.perf_counter() - started


def report(share: float, measured: list[float]) -> str:
    """The table."""
    lines = [f"{'whole core':>10} {'slower device':>14} {'measured':>10} {'ratio':>6}"]
    for seconds, taken in zip(WORK_SECONDS, measured, strict=True):
        slower = seconds / share
        lines.append(
            f"{1e3 * seconds:8.0f}ms {1e3 * slower:12.1f}ms {1e3 * taken:8.1f}ms "
            f"{taken / slower:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments.share)))
        return
    with Testbed.of_shares((arguments.share,)) as testbed:
        command = [sys.executable, __file__, "--inside", "--share", str(arguments.share)]
        done = subprocess.run(
            [*testbed.devices[0].prefix(), *command], check=True, capture_output=True, text=True
        )
    print(report(arguments.share, json.loads(done.stdout)))


if __name__ == "__main__":
    main()
