"""What devices keep between a forward and its backward, counted while they train in tiles.

    python -m tools.tile_runtime_memory [--households 6:2x3,12:4x6] [--side 416]

The first 16 layers of YOLOv2 (tools/darknet), batches of one sample, a group a unit. Each household
is a number of devices and a grid; they are the real runtime in one process with a memory mesh.
Counted is the memory of all tensors that are kept when a device begins its backward, filters left
out; printed is the device with most, beside one device that trains the same model alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from p2ptrain.model.stage import Stage
from p2ptrain.model.tiles.messages import Message
from p2ptrain.training.options import TrainOptions
from p2ptrain.training.tiling.tiled_stage import TiledStage
from tests.integration.training.household import devices
from tools.tile_memory import Kept, addresses, counting, keep, kept_bytes
from tools.tile_speed_job import job

STEPS = 2
UNITS = 12
"""Of the model, that can be tiled."""


@dataclass
class Counted:
    """By stage object, what is kept of the micro-batch under way and the most at any backward."""

    kept: dict[int, Kept] = field(default_factory=dict)
    most: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def forward(self, stage: Stage) -> Iterator[None]:
        """Count what autograd keeps meanwhile."""
        with counting(self.kept.setdefault(id(stage), {})):
            yield

    def backward(self, stage: Stage, besides: Iterable[Tensor], *, counts: bool = True) -> None:
        """It begins; `besides`: what is kept and autograd does not know of."""
        found = self.kept.pop(id(stage), {})
        if not counts:
            return
        for tensor in besides:
            keep(found, tensor)
        filters = set(addresses(stage.state().values()))
        size = kept_bytes(found, filters)
        self.most[id(stage)] = max(self.most.get(id(stage), 0), size)


@contextmanager
def counted() -> Iterator[Counted]:
    """Count in all stages of this process."""
    found = Counted()
    plain = Stage.forward, Stage.backward
    tiled = TiledStage.begin_forward, TiledStage.receive, TiledStage.begin_backward

    def forward(self: Stage, *args: Any, **how: Any) -> list[Tensor]:
        with found.forward(self):
            return plain[0](self, *args, **how)

    def backward(self: Stage, *args: Any, **how: Any) -> list[Tensor | None]:
        found.backward(self, (), counts="final" in how)  # as rounds call it; profiles do not
        return plain[1](self, *args, **how)

    def begin_forward(self: TiledStage, *args: Any) -> list[Message]:
        with found.forward(self):
            return tiled[0](self, *args)

    def receive(self: TiledStage, *args: Any) -> list[Message]:
        with found.forward(self):
            return tiled[1](self, *args)

    def begin_backward(self: TiledStage, key: int, *args: Any) -> list[Message]:
        found.backward(self, self.kept(key))
        return tiled[2](self, key, *args)

    Stage.forward, Stage.backward = forward, backward  # type: ignore[method-assign,assignment]
    TiledStage.begin_forward, TiledStage.receive = begin_forward, receive  # type: ignore[method-assign]
    TiledStage.begin_backward = begin_backward  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Stage.forward, Stage.backward = plain  # type: ignore[method-assign]
        TiledStage.begin_forward, TiledStage.receive = tiled[:2]  # type: ignore[method-assign]
        TiledStage.begin_backward = tiled[2]  # type: ignore[method-assign]


async def train(count: int, grid: tuple[int, int] | None, side: int) -> list[int]:
    """Bytes that each stage on each device keeps, the largest first."""
    options = TrainOptions(wait_for=count, steps=STEPS, planner="single", replan=False)
    if grid is not None:
        groups = tuple(range(UNITS + 1))
        options = TrainOptions(
            wait_for=count, steps=STEPS, planner="tiles", replan=False, grid=grid, groups=groups
        )
    async with devices(count, memory_bytes=4 << 30) as household:
        with counted() as found:
            await household.holder_run(job(side, 1), options).run()
    return sorted(found.most.values(), reverse=True)


def main() -> int:
    """Print a line a household."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--households", default="6:2x3,12:4x6", help="devices:grid, with commas")
    parser.add_argument("--side", type=int, default=416, help="of the images")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    (alone,) = asyncio.run(train(1, None, asked.side))
    print(f"one device: {alone / 1e6:.1f} MB", flush=True)
    for count, grid in _households(asked.households):
        largest, *_ = asyncio.run(train(count, grid, asked.side))
        print(
            f"{grid[0]}x{grid[1]} tiles on {count} devices: the largest keeps "
            f"{largest / 1e6:.1f} MB, {largest / alone:.3f} of one device",
            flush=True,
        )
    return 0


def _households(text: str) -> Sequence[tuple[int, tuple[int, int]]]:
    found = []
    for entry in text.split(","):
        count, grid = entry.split(":")
        rows, columns = (int(part) for part in grid.split("x"))
        found.append((int(count), (rows, columns)))
    return found


if __name__ == "__main__":
    sys.exit(main())
