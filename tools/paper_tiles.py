"""When do groups of tiled units pay? The paper's figures 7 and 8, from the cost model alone.

    python -m tools.paper_tiles [--samples 8] [--statistics]

The first 16 layers of YOLOv2 at 416x416 on equal devices. Rows: devices from
slow processors to accelerators; columns: links. Each cell: how much faster the best grouping is
than exchanging halos in front of every layer, and how many groups it has (layers that need no halo,
1x1 convolutions and aligned poolings, join a group for nothing). With `--statistics` batch
normalisation is exact over all tiles, as p2ptrain does it: devices meet at every layer anyway, so
grouping gains less.
"""

from __future__ import annotations

import argparse
import sys

from p2ptrain.plan.types.cluster import ClusterLink, Overheads
from p2ptrain.plan.types.feature_maps import (
    ELEMENTWISE,
    AxisWindow,
    FeatureMap,
    MapNetwork,
    MapUnit,
    Operation,
)
from p2ptrain.tiling.grid import TileGrid
from p2ptrain.tiling.planning.grouping import best_grouping
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import TileDevice, TilingProblem
from p2ptrain.tiling.planning.tiling_simulation import simulate_tiles
from tests.support.tiling_examples import by_flops

SIDE, CHANNELS = 416, 3
YOLOV2 = (
    *((32, 3), None, (64, 3), None, (128, 3), (64, 1), (128, 3), None),
    *((256, 3), (128, 1), (256, 3), None, (512, 3), (256, 1), (512, 3), (256, 1)),
)
"""The first 16 layers (Redmon and Farhadi 2017): filters and kernel, or 2x2 pooling."""
SPEEDS = {
    "Pi 3 core (0.13 Gflop/s)": 0.13e9,
    "quarter of a core (5)": 5e9,
    "laptop (100)": 1e11,
    "Nano-class GPU (400)": 4e11,
    "GPU (5000)": 5e12,
}
"""Operations a second of a whole network; the Pi's from the paper's 7 minutes a sample."""
LINKS = {
    "10 Gbit/s": ClusterLink(1.25e9, 1e-4),
    "1 Gbit/s": ClusterLink(1.25e8, 3e-4),
    "100 Mbit/s": ClusterLink(1.25e7, 5e-4),
    "Wi-Fi 20 Mbit/s": ClusterLink(2.5e6, 5e-3),
}
GRIDS = ((1, 2), (2, 3))
MESSAGE_SECONDS, BYTE_SECONDS = 5e-5, 1e-9
"""Of a device's processor: as little as a good implementation needs."""


def yolov2(*, statistics: bool) -> MapNetwork:
    """A unit a layer."""
    maps = [FeatureMap("image", CHANNELS, SIDE, SIDE, differentiable=False)]
    operations: list[Operation] = []
    units: list[MapUnit] = []
    for number, layer in enumerate(YOLOV2):
        first = len(operations)
        size = _add_layer(layer, maps, operations, statistics=statistics)
        units.append(MapUnit(f"layer{number}", first, len(operations), size))
    return MapNetwork(tuple(maps), tuple(operations), tuple(units), (0,), (len(maps) - 1,))


def _add_layer(
    layer: tuple[int, int] | None,
    maps: list[FeatureMap],
    operations: list[Operation],
    *,
    statistics: bool,
) -> int:
    """Add a layer's maps and operations; returns the bytes of its filters."""
    before = maps[-1].channels
    if layer is None:
        _add(maps, operations, "pool", AxisWindow(2, 2), before, 4.0 * before)
        return 0
    filters, size = layer
    weights = filters * before * size * size
    window = AxisWindow(size, 1, 1, size // 2, size // 2)
    _add(maps, operations, "convolution", window, filters, 2.0 * weights)
    if statistics:
        _add(maps, operations, "normalisation", ELEMENTWISE, filters, 4.0 * filters, statistics)
    return 4 * weights


def _add(
    maps: list[FeatureMap],
    operations: list[Operation],
    name: str,
    window: AxisWindow,
    channels: int,
    flops: float,
    statistics: bool = False,
) -> None:
    before, number = maps[-1], len(maps)
    height, width = window.outputs(before.height), window.outputs(before.width)
    maps.append(FeatureMap(f"{name}{number}", channels, height, width))
    operations.append(
        Operation(f"{name}{number}", (number - 1,), number, window, window, statistics, flops)
    )


def question(
    network: MapNetwork, samples: int, link: ClusterLink, flops_per_s: float, shape: tuple[int, int]
) -> Costs:
    """Equal devices, a tile each, equal tiles."""
    overheads = Overheads(MESSAGE_SECONDS, BYTE_SECONDS, 0.0)
    problem: TilingProblem = by_flops(
        network, samples, link, flops_per_s=flops_per_s, overheads=overheads
    )
    count = shape[0] * shape[1]
    grid = TileGrid(network, ((1.0,) * shape[0], (1.0,) * shape[1]))
    return Costs(problem, [TileDevice(f"device{k}") for k in range(count)], grid, range(count))


def gain(costs: Costs) -> tuple[float, int]:
    """(by how much the best grouping is faster than a group a unit, its number of groups).

    The filters' sum and the ends are left out: they are the same for every grouping (the paper
    shows them apart).
    """
    units = len(costs.problem.network.units)
    borders = best_grouping(costs)
    each, best = (
        simulate_tiles(costs, b).seconds - costs.fixed_seconds for b in (range(units + 1), borders)
    )
    return each / best, len(borders) - 1


def main() -> int:
    """Print a table a grid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1, help="of a mini-batch")
    parser.add_argument("--statistics", action="store_true", help="exact batch normalisation")
    arguments = parser.parse_args()
    network = yolov2(statistics=arguments.statistics)
    for shape in GRIDS:
        print(f"{shape[0]}x{shape[1]} tiles, {arguments.samples} samples, of {len(network.units)}")
        print(f"{'':26}" + "".join(f"{name:>18}" for name in LINKS))
        for name, flops_per_s in SPEEDS.items():
            cells = []
            for link in LINKS.values():
                costs = question(network, arguments.samples, link, flops_per_s, shape)
                cells.append("{:.2f} ({} groups)".format(*gain(costs)))
            print(f"{name:26}" + "".join(f"{cell:>18}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
