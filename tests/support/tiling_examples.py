"""Questions about tiling for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from p2ptrain.plan.types.cluster import REFERENCE, ClusterLink, Overheads
from p2ptrain.plan.types.feature_maps import ELEMENTWISE, AxisWindow, MapNetwork
from p2ptrain.tiling.grid import TileGrid
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import OF_TILES, TileDevice, TilingProblem
from tests.support.feature_maps import chain

CONVOLUTION = AxisWindow(3, 1, 1, 1, 1)
LINK = ClusterLink(1e6, 1e-3)
NOTHING = Overheads(0.0, 0.0, 0.0)
GIGAFLOP = 1e9


def by_flops(
    network: MapNetwork,
    samples: int,
    link: ClusterLink,
    *,
    flops_per_s: float,
    backward_ratio: float = 2.0,
    overheads: Overheads = OF_TILES,
    sums: Overheads = REFERENCE,
    optimizer_state_ratio: float = 0.0,
) -> TilingProblem:
    """A question without measurements: times from operations, memory from the maps' sizes.

    Args:
        network, samples, link, overheads, sums, optimizer_state_ratio: as in the question.
        flops_per_s: of the reference device.
        backward_ratio: backward by forward; a convolution's backward is two products of its size.
    """
    forward, kept = [], []
    for unit in network.units:
        operations = network.operations[unit.first : unit.end]
        made = [network.maps[operation.output] for operation in operations]
        areas = [feature_map.height * feature_map.width for feature_map in made]
        flops = sum(o.flops * area for o, area in zip(operations, areas, strict=True))
        forward.append(flops * samples / flops_per_s)
        elements = sum(m.channels * area for m, area in zip(made, areas, strict=True))
        kept.append(float(network.itemsize * elements))
    return TilingProblem(
        network=network,
        forward=tuple(forward),
        backward=tuple(seconds * backward_ratio for seconds in forward),
        kept_bytes=tuple(kept),
        samples=samples,
        link=link,
        optimizer_state_ratio=optimizer_state_ratio,
        overheads=overheads,
        sums=sums,
    )


def problem(
    units: int,
    *,
    statistics: Sequence[int] = (),
    link: ClusterLink = LINK,
    overheads: Overheads = NOTHING,
    sums: Overheads = NOTHING,
    size: int = 48,
    flops_per_s: float = GIGAFLOP,
) -> TilingProblem:
    """Convolutions of 1,000 operations a position; those in `statistics` normalise instead."""
    windows = [ELEMENTWISE if k in statistics else CONVOLUTION for k in range(units)]
    network = chain(windows, size, statistics=statistics, flops=1000.0)
    return by_flops(network, 1, link, flops_per_s=flops_per_s, overheads=overheads, sums=sums)


def costs(
    question: TilingProblem,
    shape: tuple[int, int] = (1, 2),
    *,
    slowdowns: Sequence[float] = (),
    memory_bytes: float = float("inf"),
) -> Costs:
    """A device a tile, equal tiles."""
    count = shape[0] * shape[1]
    slowness = [*slowdowns] or [1.0] * count
    devices = [TileDevice(f"d{k}", s, memory_bytes) for k, s in enumerate(slowness)]
    grid = TileGrid(question.network, ((1.0,) * shape[0], (1.0,) * shape[1]))
    return Costs(question, devices, grid, range(count))


@st.composite
def drawn_costs(draw: st.DrawFn) -> Costs:
    units = draw(st.integers(1, 7))
    question = problem(
        units,
        statistics=sorted(draw(st.sets(st.integers(1, units), max_size=2)) - {units}),
        link=ClusterLink(
            draw(st.sampled_from((1e5, 1e7))), draw(st.sampled_from((0.0, 1e-3, 0.1)))
        ),
        overheads=Overheads(draw(st.sampled_from((0.0, 1e-4))), 1e-9, 0.0),
        size=draw(st.sampled_from((24, 49))),
        flops_per_s=draw(st.sampled_from((1e6, 1e9, 1e12))),
    )
    shape = draw(st.sampled_from(((1, 2), (2, 2), (1, 3))))
    count = shape[0] * shape[1]
    slowdowns = draw(st.lists(st.floats(0.5, 3.0), min_size=count, max_size=count))
    return costs(question, shape, slowdowns=slowdowns)
