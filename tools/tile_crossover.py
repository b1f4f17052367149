"""When do groups of tiled units pay? The paper's figures 7 and 8, from the cost model alone.

    python -m tools.tile_crossover [--samples 8] [--statistics]
    python -m tools.tile_crossover --plot docs/tile_crossover.svg
    python -m tools.tile_crossover --speedups [--statistics]

The first 16 layers of YOLOv2 at 416x416 on equal devices. Rows: devices from
slow processors to accelerators; columns: links. Each cell: how much faster the best grouping is
than exchanging halos in front of every layer, and how many groups it has (layers that need no halo,
1x1 convolutions and aligned poolings, join a group for nothing). With `--statistics` batch
normalisation is exact over all tiles, as p2ptrain does it: devices meet at every layer anyway, so
grouping gains less.

`--plot`: the same for 2x3 tiles as curves over the devices' speed (needs matplotlib).

`--speedups`: on devices of 0.28 core that take 1.5 s for one sample alone (the emulated devices of
the other tables, with what a message costs them), what the simulator expects of 2, 4 and 6, and the
bound that no tiling undercuts, each as a speedup over one device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.plan.cluster import Link
from p2ptrain.plan.overheads import REFERENCE, Overheads
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.grouping import best_grouping, early_borders
from p2ptrain.plan.tiling.problem import OF_TILES, TileDevice, TilingProblem, by_flops
from p2ptrain.plan.tiling.simulate import lower_bound, simulate
from p2ptrain.tiles.grid import TileGrid
from p2ptrain.tiles.network import FeatureMap, MapNetwork, MapUnit, Operation
from p2ptrain.tiles.window import ELEMENTWISE, Window
from tools.darknet.cfg import Section, read_cfg

YOLOV2 = Path(__file__).parent / "darknet" / "yolov2_first16.cfg"
SPEEDS = {
    "Pi 3 core (0.13 Gflop/s)": 0.13e9,
    "quarter of a core (5)": 5e9,
    "laptop (100)": 1e11,
    "Nano-class GPU (400)": 4e11,
    "GPU (5000)": 5e12,
}
"""Operations a second of a whole network; the Pi's from the paper's 7 minutes a sample."""
LINKS = {
    "10 Gbit/s": Link(1.25e9, 1e-4),
    "1 Gbit/s": Link(1.25e8, 3e-4),
    "100 Mbit/s": Link(1.25e7, 5e-4),
    "Wi-Fi 20 Mbit/s": Link(2.5e6, 5e-3),
}
GRIDS = ((1, 2), (2, 3))
POINTS_A_DECADE = 6
MESSAGE_SECONDS, BYTE_SECONDS = 5e-5, 1e-9
"""Of a device's processor: as little as a good implementation needs."""


def yolov2(*, statistics: bool) -> MapNetwork:
    """The network of `yolov2_first16.cfg`, a unit a layer."""
    sections = read_cfg(YOLOV2)
    net = sections[0]
    sides = net.whole("height"), net.whole("width")
    maps = [FeatureMap("image", net.whole("channels"), *sides, differentiable=False)]
    operations: list[Operation] = []
    units: list[MapUnit] = []
    for number, section in enumerate(sections[1:]):
        first = len(operations)
        size = _add_layer(section, maps, operations, statistics=statistics)
        units.append(MapUnit(f"layer{number}", first, len(operations), size))
    return MapNetwork(tuple(maps), tuple(operations), tuple(units), (0,), (len(maps) - 1,))


def _add_layer(
    section: Section, maps: list[FeatureMap], operations: list[Operation], *, statistics: bool
) -> int:
    """Add a layer's maps and operations; returns the bytes of its filters."""
    before = maps[-1]
    size, stride = section.whole("size"), section.whole("stride")
    if section.name == "maxpool":
        window = Window(size, stride)
        flops = float(before.channels * size * size)
        _add(maps, operations, "pool", window, before.channels, flops)
        return 0
    filters = section.whole("filters")
    weights = filters * before.channels * size * size
    window = Window(size, stride, 1, size // 2, size // 2)
    _add(maps, operations, "convolution", window, filters, 2.0 * weights)
    if statistics:
        _add(maps, operations, "normalisation", ELEMENTWISE, filters, 4.0 * filters, statistics)
    return 4 * weights


def _add(
    maps: list[FeatureMap],
    operations: list[Operation],
    name: str,
    window: Window,
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
    network: MapNetwork, samples: int, link: Link, flops_per_s: float, shape: tuple[int, int]
) -> Costs:
    """Equal devices, a tile each, equal tiles."""
    overheads = Overheads(MESSAGE_SECONDS, BYTE_SECONDS, 0.0, 0.0, 0.0)
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
        simulate(costs, b).seconds - costs.fixed_seconds for b in (range(units + 1), borders)
    )
    return each / best, len(borders) - 1


def plot(network: MapNetwork, samples: int, file: Path) -> None:
    """Gains of the best grouping over the devices' speed, a curve a link, as SVG."""
    import matplotlib  # of the extra "examples", by way of mlxtend

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "tile_crossover"  # the same file from the same numbers
    figure, axes = pyplot.subplots(figsize=(7, 4))
    speeds = [10 ** (8 + k / POINTS_A_DECADE) for k in range(4 * POINTS_A_DECADE + 1)]
    for name, link in LINKS.items():
        gains = [gain(question(network, samples, link, speed, (2, 3)))[0] for speed in speeds]
        axes.plot([speed / 1e9 for speed in speeds], gains, label=name)
    axes.axhline(1.2, color="#999999", linewidth=0.8, linestyle="--")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="a device's speed, Gflop/s",
        ylabel="time without groups / with the best ones",
        title=f"YOLOv2, 16 layers, 2x3 tiles, batch {samples}",
    )
    axes.set_yticks([1, 1.2, 2, 5, 10, 20], ["1", "1.2", "2", "5", "10", "20"])
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


CORE_PART, ALONE_SECONDS = 0.28, 1.5
SHAPES = {2: (1, 2), 4: (2, 2), 6: (2, 3)}


def speedups(network: MapNetwork) -> Iterator[str]:
    """Lines of the second table."""
    flops = by_flops(network, 1, LINKS["1 Gbit/s"], flops_per_s=1.0).seconds
    for link in ("1 Gbit/s", "100 Mbit/s"):
        for samples in (1, 8):
            problem = by_flops(
                network,
                samples,
                LINKS[link],
                flops_per_s=flops / ALONE_SECONDS,
                overheads=OF_TILES.times_slowdown(1 / CORE_PART),
                sums=REFERENCE.times_slowdown(1 / CORE_PART),
            )
            cells = []
            for count, shape in SHAPES.items():
                devices = [TileDevice(f"device{k}") for k in range(count)]
                grid = TileGrid(network, ((1.0,) * shape[0], (1.0,) * shape[1]))
                plain = Costs(problem, devices, grid, range(count))
                costs = plain.with_early(early_borders(plain))
                found = simulate(costs, best_grouping(costs)).seconds
                bound = lower_bound(problem, devices)
                cells.append(f"{problem.seconds / found:5.2f} of {problem.seconds / bound:5.2f}")
            yield f"{link:12} batch {samples}" + "".join(f"{cell:>20}" for cell in cells)


def main() -> int:
    """Print a table a grid, or the speedups, or draw the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1, help="of a mini-batch")
    parser.add_argument("--statistics", action="store_true", help="exact batch normalisation")
    parser.add_argument("--speedups", action="store_true", help="instead: of 2, 4 and 6 devices")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="instead: draw curves")
    arguments = parser.parse_args()
    network = yolov2(statistics=arguments.statistics)
    if arguments.plot:
        plot(network, arguments.samples, arguments.plot)
        return 0
    if arguments.speedups:
        print(f"{'':19}" + "".join(f"{f'{count} devices':>20}" for count in SHAPES))
        for line in speedups(network):
            print(line)
        return 0
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
