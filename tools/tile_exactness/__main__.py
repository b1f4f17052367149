"""Tiled training beside plain torch: how far losses, gradients and running statistics lie apart.

    python -m tools.tile_exactness                       everything, about five minutes
    python -m tools.tile_exactness --only yolov2,unet    some networks; groupings = every grouping
    python -m tools.tile_exactness --grids 2x3 --types float64 --steps 5

One process, every tile on an emulated device of its own; SGD with momentum. Lines are

    float64   each network on each grid, with a group for each unit, the same with halos that travel
              with statistics ("early"), and with pairs of units, 20 steps; every grouping of the
              network of six units. Bounds: losses 1e-8, gradients 1e-6 of each tensor's largest
              value in the first step, statistics 1e-8
    float32   each network on each grid, 8 steps from each of five seeds: median and largest
              difference of a loss, and in how many of the five it is within 1e-5, for tiles and for
              plain torch with the samples of each batch in reverse order. Bound: the median 1e-5

A difference in rounding sometimes puts a value on the other side of a kink (ReLU, maximum), and
from there two trainings part; that happens to plain torch just the same. The networks called
"smooth" have no kinks. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import statistics
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
STEPS = {"float64": 20, "float32": 8}
SEEDS = range(5)
LOSS_BOUNDS = {"float64": 1e-8, "float32": 1e-5}
GRADIENT_BOUND = 1e-6
BUFFER_BOUND = 1e-8

Case = tuple[str, tuple[int, ...], bool]
"""(grid, borders of its groups, whether halos travel with statistics where they can)."""


def main() -> int:
    """Print a line a case; 1 if any misses a bound."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    names = arguments.only.split(",") if arguments.only else [*EXAMPLES, GROUPINGS]
    grids = arguments.grids.split(",")
    missed = 0
    for kind in arguments.types.split(","):
        steps = arguments.steps or STEPS[kind]
        for name in names:
            if kind == "float64":
                missed += _in_double(name, grids, steps)
            elif name != GROUPINGS:
                missed += _in_single(name, grids, steps)
    print(f"{missed} cases missed a bound" if missed else "all within the bounds")
    return 1 if missed else 0


def _in_double(name: str, grids: Sequence[str], steps: int) -> int:
    prepared = prepare("six" if name == GROUPINGS else name, torch.float64, steps)
    plain = train_plainly(prepared)
    missed = 0
    cases = _all_groupings() if name == GROUPINGS else _some_groupings(prepared, grids)
    for grid, borders, early in cases:
        start = time.perf_counter()
        line = f"float64 {prepared.name:18} {grid} {_shown(borders):20}{' early' if early else ''}"
        try:
            run, same = train_tiled(prepared, *_laid(prepared, grid, borders, early=early))
        except GridError as error:
            print(f"{line} refused: {error}", flush=True)
            continue
        apart = compare(plain, run, same)
        good = _within(apart)
        missed += not good
        print(
            f"{line} losses {apart.losses:.1e} gradients {apart.gradients:.1e} statistics "
            f"{apart.buffers:.1e} {time.perf_counter() - start:5.1f} s{'' if good else '  MISSED'}",
            flush=True,
        )
    return missed


def _in_single(name: str, grids: Sequence[str], steps: int) -> int:
    bound = LOSS_BOUNDS["float32"]
    tiled: dict[str, list[Apart]] = {grid: [] for grid in grids}
    turned: list[Apart] = []
    for seed in SEEDS:
        prepared = prepare(name, torch.float32, steps, seed)
        plain = train_plainly(prepared)
        turned.append(compare(plain, train_plainly(prepared, reverse=True), True))
        for grid in grids:
            borders = tuple(range(len(prepared.part.network.units) + 1))
            run, same = train_tiled(prepared, *_laid(prepared, grid, borders))
            tiled[grid].append(compare(plain, run, same))
    missed = 0
    for what, found in (("plain, reversed", turned), *tiled.items()):
        losses = [apart.losses for apart in found]
        good = statistics.median(losses) <= bound and all(apart.replicas for apart in found)
        missed += not good
        within = sum(loss <= bound for loss in losses)
        gradients = max(apart.gradients for apart in found)
        print(
            f"float32 {name:18} {what:15} losses: median {statistics.median(losses):.1e} largest "
            f"{max(losses):.1e}, {within} of {len(losses)} within {bound:.0e}; gradients "
            f"{gradients:.1e}{'' if good else '  MISSED'}",
            flush=True,
        )
    return missed


def _laid(
    prepared: Prepared, grid: str, borders: Sequence[int], *, early: bool = False
) -> tuple[Layout, range]:
    rows, columns = (int(part) for part in grid.split("x"))
    network = prepared.part.network.with_early(borders if early else ())
    layout = Layout(network, ((1.0,) * rows, (1.0,) * columns), borders)
    return layout, range(layout.tiles)


def _all_groupings() -> Iterator[Case]:
    for count in range(6):
        for inner in combinations(range(1, 6), count):
            yield "2x2", (0, *inner, 6), False


def _some_groupings(prepared: Prepared, grids: Sequence[str]) -> Iterator[Case]:
    units = len(prepared.part.network.units)
    for grid in grids:
        each = tuple(range(units + 1))
        yield grid, each, False
        if any(map(prepared.part.network.may_be_early, each)):
            yield grid, each, True
        yield grid, (*range(0, units, 2), units), False


def _within(apart: Apart) -> bool:
    return (
        apart.losses <= LOSS_BOUNDS["float64"]
        and apart.gradients <= GRADIENT_BOUND
        and apart.buffers <= BUFFER_BOUND
        and apart.replicas
    )


def _shown(borders: Sequence[int]) -> str:
    text = ",".join(str(border) for border in borders)
    return text if len(text) <= 20 else f"{len(borders) - 1} groups"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools.tile_exactness", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = __doc__
    parser.add_argument("--only", help="networks, with commas")
    parser.add_argument("--grids", default=",".join(GRIDS), help="rows x columns, with commas")
    parser.add_argument("--types", default=",".join(STEPS), help="float64, float32 or both")
    parser.add_argument("--steps", type=int, help="instead of 20 and 8")
    return parser


if __name__ == "__main__":
    sys.exit(main())
