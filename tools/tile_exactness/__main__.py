"""Tiled training beside plain torch: how far losses, gradients and running statistics lie apart.

    python -m tools.tile_exactness                       everything
    python -m tools.tile_exactness --only yolov2,unet    some networks; groupings = every grouping
    python -m tools.tile_exactness --grids 2x3 --steps 5

One process, every tile on an emulated device of its own. Each network in float64 (20 steps) and in
float32 (8 steps), on each grid, with a group for each unit and with pairs of units; then every
grouping of the network of six units. Exits with 1 if a bound is missed: losses 1e-8 and 1e-5,
gradients 1e-6 of each tensor's largest value (in float64).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch

from p2ptrain.tiles.layout import Layout
from p2ptrain.tiles.lines import GridError
from tools.tile_exactness.models import EXAMPLES
from tools.tile_exactness.training import (
    Apart,
    Prepared,
    compare,
    prepare,
    train_plainly,
    train_tiled,
)

GRIDS = ("1x2", "2x2", "2x3", "3x3")
GROUPINGS = "groupings"
STEPS = {torch.float64: 20, torch.float32: 8}
LOSS_BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-5}
GRADIENT_BOUND = 1e-6
BUFFER_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}


def main() -> int:
    """Print a line a case; 1 if any misses a bound."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    names = arguments.only.split(",") if arguments.only else [*EXAMPLES, GROUPINGS]
    grids = arguments.grids.split(",")
    head = f"{'network':12} {'grid':4} {'groups':22} {'type':7}"
    print(f"{head} {'losses':>8} {'gradients':>9} {'time':>6}")
    missed = 0
    for name in names:
        for dtype in STEPS:
            steps = arguments.steps or STEPS[dtype]
            if name == GROUPINGS:
                missed += _try(prepare("six", dtype, steps), dtype, _all_groupings())
            else:
                prepared = prepare(name, dtype, steps)
                missed += _try(prepared, dtype, _some_groupings(prepared, grids))
    print(f"{missed} cases missed a bound" if missed else "all within the bounds")
    return 1 if missed else 0


Case = tuple[str, tuple[int, ...]]
"""(grid, borders of its groups)."""


def _all_groupings() -> Iterator[Case]:
    for count in range(6):
        for inner in combinations(range(1, 6), count):
            yield "2x2", (0, *inner, 6)


def _some_groupings(prepared: Prepared, grids: Sequence[str]) -> Iterator[Case]:
    units = len(prepared.part.network.units)
    for grid in grids:
        yield grid, tuple(range(units + 1))
        yield grid, (*range(0, units, 2), units)


def _try(prepared: Prepared, dtype: torch.dtype, cases: Iterator[Case]) -> int:
    plain = train_plainly(prepared)
    missed = 0
    for grid, borders in cases:
        rows, columns = (int(part) for part in grid.split("x"))
        start = time.perf_counter()
        line = f"{prepared.name:12} {grid:4} {_shown(borders):22} {str(dtype)[6:]:7}"
        try:
            layout = Layout(prepared.part.network, ((1.0,) * rows, (1.0,) * columns), borders)
        except GridError as error:
            print(f"{line} refused: {error}", flush=True)
            continue
        run, same = train_tiled(prepared, layout, range(layout.tiles))
        apart = compare(plain, run, same)
        good = _within(apart, dtype)
        missed += not good
        seconds = time.perf_counter() - start
        print(
            f"{line} {apart.losses:8.1e} {apart.gradients:9.1e} {seconds:5.1f}s"
            f"{'' if good else '  MISSED ' + str(apart)}",
            flush=True,
        )
    return missed


def _within(apart: Apart, dtype: torch.dtype) -> bool:
    return (
        apart.losses <= LOSS_BOUNDS[dtype]
        and (dtype is not torch.float64 or apart.gradients <= GRADIENT_BOUND)
        and apart.buffers <= BUFFER_BOUNDS[dtype]
        and apart.replicas
    )


def _shown(borders: Sequence[int]) -> str:
    text = ",".join(str(border) for border in borders)
    return text if len(text) <= 22 else f"{len(borders) - 1} groups"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools.tile_exactness", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = __doc__
    parser.add_argument("--only", help="networks, with commas")
    parser.add_argument("--grids", default=",".join(GRIDS), help="rows x columns, with commas")
    parser.add_argument("--steps", type=int, help="instead of 20 and 8")
    return parser


if __name__ == "__main__":
    sys.exit(main())
