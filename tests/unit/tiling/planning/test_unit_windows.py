"""Units as single windows, as profile files have them."""

from __future__ import annotations

from p2ptrain.plan.types.feature_maps import (
    ELEMENTWISE,
    AxisWindow,
    FeatureMap,
    MapNetwork,
    MapUnit,
    Operation,
)
from p2ptrain.tiling.planning.profile_maps import unit_windows

THREE, HALF = AxisWindow(3, 1, 1, 1, 1), AxisWindow(2, 2)


def network(*units: tuple[tuple[int, int, AxisWindow, int], ...]) -> MapNetwork:
    """By unit: (read map, made map, window, size of the made map); map 0 is 16 x 16."""
    sizes = {0: 16, **{made: size for unit in units for _, made, _, size in unit}}
    maps = tuple(FeatureMap(f"m{n}", 2, sizes[n], sizes[n]) for n in range(max(sizes) + 1))
    operations, limits = [], []
    for number, unit in enumerate(units):
        first = len(operations)
        by_output: dict[int, list[int]] = {}
        for read, made, _, _ in unit:
            by_output.setdefault(made, []).append(read)
        for made, reads in by_output.items():
            window = next(w for _, m, w, _ in unit if m == made)
            operations.append(Operation(f"o{made}", tuple(reads), made, window, window))
        limits.append(MapUnit(f"u{number}", first, len(operations)))
    return MapNetwork(maps, tuple(operations), tuple(limits), (0,), (len(maps) - 1,))


def test_a_convolution_and_a_pooling_are_one_window() -> None:
    (unit,) = unit_windows(network(((0, 1, THREE, 16), (1, 2, ELEMENTWISE, 16), (2, 3, HALF, 8))))
    assert (unit.kernel, unit.stride, unit.padding) == ((4, 4), (2, 2), (1, 1))
    assert (unit.height, unit.width) == (16, 16)


def test_a_residual_block_is_what_covers_both_ways() -> None:
    block = ((0, 1, THREE, 16), (1, 2, THREE, 16), (0, 3, ELEMENTWISE, 16), (2, 3, ELEMENTWISE, 16))
    (unit,) = unit_windows(network(block))
    assert (unit.kernel, unit.stride, unit.padding) == ((5, 5), (1, 1), (2, 2))


def test_dilation_becomes_extent() -> None:
    (unit,) = unit_windows(network(((0, 1, AxisWindow(3, 1, 2, 2, 2), 16),)))
    assert (unit.kernel, unit.dilation, unit.padding) == ((5, 5), (1, 1), (2, 2))


def test_a_unit_that_gives_two_maps_ends_the_chain() -> None:
    two = ((0, 1, THREE, 16), (1, 2, THREE, 16))
    later = ((1, 3, ELEMENTWISE, 16), (2, 3, ELEMENTWISE, 16))
    assert unit_windows(network(two, later)) == ()


def test_what_is_padded_on_one_side_only_is_no_single_window() -> None:
    assert unit_windows(network(((0, 1, AxisWindow(2, 1, 1, 0, 1), 16),))) == ()
