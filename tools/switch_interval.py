"""How much a thread that computes in Python slows torch in another, by the switch interval.

    python tools/switch_interval.py [--steps 10]

A training step of a small convolutional network, on one thread, by itself and beside a thread that
only counts: milliseconds of a step for each interval. torch gives the interpreter away inside each
operator and must have it back before the next.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

import torch
from torch import nn

INTERVALS_SECONDS = (0.005, 0.001, 0.0005, 0.0002, 0.0001)
LAYERS, CHANNELS = 20, 32


def main() -> None:
    """Print a line an interval."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="of each (default: 10)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"by itself          {1000 * _step_seconds(steps):8.1f} ms")
    ended = threading.Event()
    threading.Thread(target=_count, args=(ended,), daemon=True).start()
    for interval in INTERVALS_SECONDS:
        sys.setswitchinterval(interval)
        print(f"beside, {1000 * interval:6.1f} ms {1000 * _step_seconds(steps):12.1f} ms")
    ended.set()


def _step_seconds(steps: int) -> float:
    layers = [
        nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()
        )
        for _ in range(LAYERS)
    ]
    model, images = nn.Sequential(*layers), torch.randn(8, CHANNELS, 16, 16)
    begin = 0.0
    for step in range(steps + 1):
        if step == 1:  # the first one prepares kernels
            begin = time.perf_counter()
        model(images).sum().backward()
    return (time.perf_counter() - begin) / steps


def _count(ended: threading.Event) -> None:
    count = 0
    while not ended.is_set():
        count += 1


if __name__ == "__main__":
    main()
