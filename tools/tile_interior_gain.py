"""What the simulator expects of interiors that are computed while halos travel.

    python -m tools.tile_interior_gain

The first seven units of VGG-16 at 224x224 (`tools/tile_speed_job.py`), a group each, in equal tiles
on devices of 0.28 of a core of 100 Gflop/s: seconds of the forward through the tiles, if everything
waits for its halos, and as planned; and how many of the six borders with halos the planner splits.
"""

from __future__ import annotations

import torch
from torch import nn

from p2ptrain.model.capture import capture
from p2ptrain.plan.cluster import Link
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.problem import TileDevice, by_flops
from p2ptrain.plan.tiling.simulate import simulate
from p2ptrain.tiles.grid import TileGrid
from p2ptrain.tiles.interior import NEVER, SPLITTING
from p2ptrain.tiles.network import MapNetwork
from p2ptrain.training.tiling.stage_tiles import tileable
from tools.tile_speed_job import CLASSES, Classifier

UNITS, SHARE, FLOPS_PER_S = 7, 0.28, 100e9
LINKS = {
    "1 Gbit/s": Link(125e6, 3e-4),
    "100 Mbit/s": Link(12.5e6, 5e-4),
    "20 Mbit/s": Link(2.5e6, 3e-3),
}
GRIDS = {2: (1, 2), 4: (2, 2)}


def network() -> MapNetwork:
    """The maps of the first units."""
    batch = torch.randn(2, 3, 224, 224), torch.randint(CLASSES, (2,))
    model = Classifier("vgg16")
    captured = capture(model, nn.functional.cross_entropy, batch, evaluation=True)
    return tileable(captured.description).first_units(UNITS)


def line(maps: MapNetwork, name: str, count: int, batch: int) -> str:
    """Of the table."""
    question = by_flops(maps, batch, LINKS[name], flops_per_s=FLOPS_PER_S)
    devices = [TileDevice(f"d{k}", 1 / SHARE) for k in range(count)]
    rows, columns = GRIDS[count]
    grid, borders = TileGrid(maps, ((1.0,) * rows, (1.0,) * columns)), range(UNITS + 1)
    waiting, planned = (
        Costs(question, devices, grid, range(count), splitting=s) for s in (NEVER, SPLITTING)
    )
    before, after = (simulate(costs, borders).forward for costs in (waiting, planned))
    return (
        f"{name:>10} {count:7} {batch:5} {before:8.3f} {after:8.3f} {1 - after / before:6.1%} "
        f"{len(planned.interiors(borders)):5}"
    )


def main() -> None:
    """Print the table."""
    maps = network()
    print("      link devices batch  waiting  planned   gain split")
    for name in LINKS:
        for count in GRIDS:
            for batch in (1, 4):
                print(line(maps, name, count, batch))


if __name__ == "__main__":
    main()
