"""Networks of maps for the tests of this room, written by hand or drawn."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from p2ptrain.plan.types.feature_maps import (
    ELEMENTWISE,
    AxisWindow,
    FeatureMap,
    MapNetwork,
    MapUnit,
    Operation,
)

CHANNELS = 4


def chain(
    windows: Sequence[AxisWindow], size: int, *, statistics: Sequence[int] = (), flops: float = 0.0
) -> MapNetwork:
    """One operator a unit, the same along both axes; `statistics` names those that normalise."""
    maps, operations = [FeatureMap("input", CHANNELS, size, size, differentiable=False)], []
    for k, window in enumerate(windows):
        made = window.outputs(maps[-1].height)
        assert made >= 1
        maps.append(FeatureMap(f"map{k}", CHANNELS, made, made))
        operations.append(Operation(f"op{k}", (k,), k + 1, window, window, k in statistics, flops))
    units = tuple(MapUnit(f"unit{k}", k, k + 1, 100) for k in range(len(windows)))
    return MapNetwork(tuple(maps), tuple(operations), units, (0,), (len(windows),))


def drawn_windows() -> st.SearchStrategy[AxisWindow]:
    """Windows with paddings that torch would take."""
    return st.builds(
        lambda kernel, stride, dilation, padding: AxisWindow(
            kernel, stride, dilation, min(padding, kernel - 1), min(padding, kernel - 1)
        ),
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(0, 3),
    )


@st.composite
def drawn_networks(draw: st.DrawFn) -> MapNetwork:
    """Chains with additions of earlier maps of the same size, one to two operators a unit."""
    size = draw(st.integers(20, 60))
    maps = [FeatureMap("input", CHANNELS, size, size, differentiable=False)]
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, 6))):
        last = len(maps) - 1
        same = [k for k in range(1, last) if maps[k].height == maps[last].height]
        reads, window = (last,), ELEMENTWISE
        if same and draw(st.booleans()):
            reads = (last, draw(st.sampled_from(same)))
        else:
            window = draw(drawn_windows())
        made = window.outputs(maps[last].height)
        if made < 4:
            break
        number = len(maps)
        maps.append(FeatureMap(f"map{number}", CHANNELS, made, made))
        statistics = window == ELEMENTWISE and len(reads) == 1 and draw(st.booleans())
        operations.append(Operation(f"op{number}", reads, number, window, window, statistics))
    if not operations:
        return chain([ELEMENTWISE], size)
    cuts = draw(st.sets(st.integers(1, len(operations)))) | {len(operations)}
    borders = [0, *sorted(cuts)]
    units = tuple(MapUnit(f"unit{k}", borders[k], borders[k + 1]) for k in range(len(borders) - 1))
    return MapNetwork(tuple(maps), tuple(operations), units, (0,), (len(maps) - 1,))
