"""What it costs to compute a convolution's interior first, and its strips when halos are there.

    python -m tools.tile_interior [--repeats 15]

Forwards of VGG-16's layers on one thread, a corner tile of each grid, float32, recorded by autograd
(`known`). `more` is what all this takes beyond the whole convolution at once, as part of it, and
by the strips' part of the outputs (`Splitting.strip_cost`). Processor time counts, so that others
on the machine disturb little; a layer whose memory comes from the kernel each time varies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from p2ptrain.model.graph import InputRef, Node, StateRef
from p2ptrain.model.tiles.interior import InteriorFirst, as_known
from p2ptrain.model.tiles.kernels import Place, convolution
from p2ptrain.model.tiles.pieces import cut
from p2ptrain.tiles.interior import Splitting
from p2ptrain.tiles.layout import Layout
from p2ptrain.tiles.network import FeatureMap, MapNetwork, MapUnit, Operation
from p2ptrain.tiles.window import ELEMENTWISE, Window

LAYERS = ((64, 64, 224), (64, 128, 112), (128, 128, 112), (256, 256, 56), (512, 512, 28))
"""(channels read, channels made, side of both maps)."""
GRIDS = ((1, 2), (2, 2), (1, 4))
WHEREVER = Splitting(least_part=0.0)
CONVOLUTION = Window(3, 1, 1, 1, 1)


def network(before: int, after: int, side: int) -> MapNetwork:
    """An operator that makes the map, and the convolution of it."""
    maps = [FeatureMap(name, c, side, side) for name, c in (("x", 3), ("y", before), ("z", after))]
    work = 2.0 * 9 * before * after
    return MapNetwork(
        tuple(maps),
        (
            Operation("first", (0,), 1, ELEMENTWISE, ELEMENTWISE),
            Operation("second", (1,), 2, CONVOLUTION, CONVOLUTION, flops=work),
        ),
        (MapUnit("first", 0, 1), MapUnit("second", 1, 2)),
        (0,),
        (2,),
    )


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Of the processor, the median."""
    taken = []
    for _ in range(repeats + 2):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken[2:])


def measure(layer: tuple[int, int, int], grid: tuple[int, int], batch: int, repeats: int) -> str:
    """A line of the table."""
    before, after, _ = layer
    layout = Layout(network(*layer), ((1.0,) * grid[0], (1.0,) * grid[1]), (0, 1, 2))
    found = layout.interior(1, 0, WHEREVER)
    assert found is not None
    arguments = (StateRef("weight"), None, (1, 1), (1, 1), (1, 1), 1)
    node = Node("second", "aten.conv2d.default", (InputRef(0), *arguments), (), True)
    operation, source = layout.network.operations[1], layout.network.maps[1]
    place = Place(node, operation, {InputRef(0): 0}, source, found.outputs, in_place=False)
    state = {"weight": torch.nn.Parameter(torch.randn(after, before, 3, 3))}
    owned, required = layout.owned(0, 1), layout.required(1, 0, 1)
    first = InteriorFirst(found, place, state, owned, required)
    x = torch.randn(batch, before, required.rows.size, required.columns.size)
    own = cut(x, owned.within(required)).contiguous()
    whole = convolution(place, state, place.padding)
    made = first.begin(own)

    def recorded() -> None:
        with torch.enable_grad():
            as_known(made.detach(), whole, [x])

    at_once, early, strips, known = (
        seconds(run, repeats)
        for run in (
            *(lambda: whole([x]), lambda: first.begin(own), lambda: first.finish(made, x)),
            recorded,
        )
    )
    part = 1 - found.inner.area / found.outputs.area
    more = (early + strips + known - at_once) / at_once
    return (
        f"{before:4} -> {after:3} {layer[2]:4} {grid[0]}x{grid[1]} {batch:5} {at_once * 1e3:7.2f} "
        f"{early * 1e3:7.2f} {strips * 1e3:7.2f} {known * 1e3:7.2f} {1 - part:8.3f} {more:7.1%} "
        f"{more / part:6.1f}"
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("   layer    side grid batch   whole   early  strips   known interior    more by part")
    with torch.no_grad():
        for layer in LAYERS:
            for grid in GRIDS:
                for batch in (1, 4):
                    print(measure(layer, grid, batch, asked.repeats), flush=True)


if __name__ == "__main__":
    main()
