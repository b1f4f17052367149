"""Layouts held against sets of single positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.types.allocation import TileShape
from p2ptrain.plan.types.feature_maps import ELEMENTWISE, AxisSpan, AxisWindow, MapNetwork, MapUnit
from p2ptrain.tiling.grid import GridError, GridLayout, lines_by_weight
from tests.support.feature_maps import chain, drawn_networks

CONVOLUTION = AxisWindow(3, 1, 1, 1, 1)
POOLING = AxisWindow(2, 2)


def positions(span: AxisSpan) -> set[int]:
    return set(range(span.first, span.end))


def naive_rows(layout: GridLayout, place: int, row: int) -> dict[int, set[int]]:
    """Rows of every map that a row of tiles depends on in a group, position by position."""
    network, group, tile = layout.network, layout.groups[place], row * layout.grid.shape[1]
    found = {number: positions(layout.owned(tile, number).rows) for number in group.leaving}
    for operation in reversed(network.operations_of(group.first, group.end)):
        if operation.statistics:
            for number in (operation.output, *operation.inputs):
                owned = positions(layout.owned(tile, number).rows)
                found[number] = found.get(number, set()) | owned
        if operation.output not in found:
            continue
        window, outputs = operation.rows, found[operation.output]
        for number in operation.inputs:
            read = {
                o * window.stride - window.before + window.dilation * j
                for o in outputs
                for j in range(window.kernel)
            }
            inside = read & set(range(network.maps[number].height))
            found[number] = found.get(number, set()) | inside
    return found


@st.composite
def layouts(draw: st.DrawFn) -> GridLayout:
    network = draw(drawn_networks())
    count = len(network.units)
    inner = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    weights = [draw(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=3)) for _ in range(2)]
    try:
        return GridLayout(
            network,
            (weights[0], weights[1]),
            [0, *sorted(inner), count],
            aligned=draw(st.booleans()),
        )
    except GridError:
        assume(False)
        raise


@settings(max_examples=30, deadline=None)
@given(layouts())
def test_a_tile_has_all_that_its_outputs_depend_on(layout: GridLayout) -> None:
    plain = all(
        o.rows.dilation == 1 and o.rows.kernel >= o.rows.stride for o in layout.network.operations
    )
    for place in range(len(layout.groups)):
        for row in range(layout.grid.shape[0]):
            for number, needed in naive_rows(layout, place, row).items():
                span = layout.required(place, row * layout.grid.shape[1], number).rows
                assert needed <= positions(span)
                if plain and needed:
                    assert (min(needed), max(needed) + 1) == (span.first, span.end)


@settings(max_examples=15, deadline=None)
@given(layouts())
def test_tiles_own_every_position_once(layout: GridLayout) -> None:
    for number, feature_map in enumerate(layout.network.maps):
        owners = Counter(
            (row, column)
            for tile in range(layout.tiles)
            for row in positions(layout.owned(tile, number).rows)
            for column in positions(layout.owned(tile, number).columns)
        )
        assert set(owners.values()) == {1}
        assert len(owners) == feature_map.height * feature_map.width


@settings(max_examples=15, deadline=None)
@given(layouts())
def test_halos_bring_just_what_is_missing(layout: GridLayout) -> None:
    for place, group in enumerate(layout.groups):
        for number in set(group.entering) - set(layout.network.entering):
            if not layout.is_used(place, number):
                continue
            for tile in range(layout.tiles):
                pieces = [
                    t for t in layout.transfers[place] if t.receiver == tile and t.map == number
                ]
                required = layout.required(place, tile, number)
                own = required.intersection(layout.owned(tile, number))
                assert own.area + sum(t.region.area for t in pieces) == required.area
                assert len(pieces) <= 8
                for piece in pieces:
                    assert piece.region.intersection(layout.owned(piece.sender, number)) == (
                        piece.region
                    )


def test_up_to_eight_neighbours() -> None:
    network = chain([CONVOLUTION] * 2, 9)
    layout = GridLayout(network, ([1] * 3, [1] * 3), (0, 1, 2))
    assert layout.transfers[0] == ()
    assert sorted(t.sender for t in layout.transfers[1] if t.receiver == 4) == [
        *range(4),
        *range(5, 9),
    ]
    assert {t.region.area for t in layout.transfers[1] if t.receiver == 4} == {1, 3}


def test_no_halo_in_front_of_a_pooling() -> None:
    network = chain([CONVOLUTION, POOLING, CONVOLUTION], 26)
    layout = GridLayout(network, ([1, 1, 1], [1, 1]), (0, 1, 2, 3))
    assert layout.transfers[1] == ()
    assert layout.transfers[2] != ()
    assert [layout.owned(t, 1).rows for t in (0, 2, 4)] == [
        AxisSpan(0, 8),
        AxisSpan(8, 18),
        AxisSpan(18, 26),
    ]


def test_groups_need_wider_halos() -> None:
    network = chain([CONVOLUTION] * 4, 24)
    narrow = GridLayout(network, ([1, 1], [1]), (0, 1, 2, 3, 4))
    wide = GridLayout(network, ([1, 1], [1]), (0, 1, 4))
    assert [t.region.rows.size for t in narrow.transfers[3]] == [1, 1]
    assert [t.region.rows.size for t in wide.transfers[1]] == [3, 3]
    assert wide.required(1, 0, 2).rows == AxisSpan(0, 14)
    assert wide.required(1, 0, 4).rows == AxisSpan(0, 12)


def test_what_normalises_has_at_least_its_own_part() -> None:
    windows = [CONVOLUTION, ELEMENTWISE, AxisWindow(1, 2)]
    network = chain(windows, 9, statistics=[1])
    layout = GridLayout(network, ([1, 1], [1]), (0, 3))
    for tile in range(2):
        owned = layout.owned(tile, 1)
        assert layout.required(0, tile, 1).intersection(owned) == owned


def test_unequal_tiles() -> None:
    assert lines_by_weight(13, [1, 1, 1]) == (0, 4, 9, 13)
    assert lines_by_weight(10, [3, 1]) == (0, 8, 10)
    assert lines_by_weight(3, [100, 1, 1]) == (0, 1, 2, 3)
    with pytest.raises(OptionError, match="above 0"):
        lines_by_weight(3, [1, 0])
    with pytest.raises(OptionError, match="above 0"):
        lines_by_weight(3, [])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_every_tile_has_a_position_where_there_are_enough(size: int, weights: list[float]) -> None:
    lines = lines_by_weight(size, weights)
    assert lines[0] == 0
    assert lines[-1] == size
    sizes = [b - a for a, b in pairwise(lines)]
    assert min(sizes) >= (1 if size >= len(weights) else 0)


def grid(network: MapNetwork, rows: int, columns: int, borders: list[int]) -> GridLayout:
    return GridLayout(network, ([1] * rows, [1] * columns), borders)


def test_a_grid_larger_than_a_map_is_refused() -> None:
    network = chain([POOLING, POOLING], 12)
    with pytest.raises(GridError, match=r"4 rows does not fit the map of layer unit1.* 3 rows"):
        grid(network, 4, 1, [0, 1, 2])


def test_a_halo_wider_than_the_tiles_is_refused() -> None:
    network = chain([CONVOLUTION] * 5, 9)
    grid(network, 1, 3, [0, 1, 4, 5])
    with pytest.raises(GridError, match=r"of layer unit0 have \[3, 3, 3\] columns.*unit1 to unit4"):
        grid(network, 1, 3, [0, 1, 5])


@pytest.mark.parametrize("borders", [[0], [0, 1], [1, 2], [0, 1, 1, 2], [0, 2, 1, 2]])
def test_groups_cover_the_units(borders: list[int]) -> None:
    with pytest.raises(OptionError, match="groups must follow each other"):
        grid(chain([CONVOLUTION] * 2, 9), 1, 1, borders)


def test_units_may_meet_before_the_statistics_of_the_one_in_front() -> None:
    """The second half of a unit begins the next group, which then needs the halo of the first."""
    windows = [CONVOLUTION, ELEMENTWISE, POOLING, CONVOLUTION]
    network = replace(
        chain(windows, 16, statistics=[1]),
        units=(MapUnit("one", 0, 3), MapUnit("two", 3, 4)),
    )
    assert [network.may_be_early(border) for border in range(3)] == [False, True, False]
    early = network.with_early([1])
    assert [(unit.first, unit.end) for unit in early.units] == [(0, 1), (1, 4)]
    assert network.with_early([]) == network
    layout = GridLayout(early, ([1, 1], [1]), (0, 1, 2))
    (up, down) = layout.transfers[1]
    assert {up.map, down.map} == {1}  # what the first convolution makes
    assert up.region.rows.size == down.region.rows.size == 2  # a row behind the pooling
    unmoved = chain([ELEMENTWISE, CONVOLUTION], 16, statistics=[0])
    assert unmoved.with_early([1]) == unmoved  # its unit would have nothing left


def test_a_shape_says_where_halos_are_early() -> None:
    shape = TileShape((0.5, 0.5), (1.0,), (0, 1, 3), early=(1,))
    assert read_form(TileShape, write_form(shape), "tiles") == shape
    for early in [(0,), (2,), (3,), (1, 1)]:
        with pytest.raises(OptionError, match="halos travel early at borders between two groups"):
            TileShape((0.5, 0.5), (1.0,), (0, 1, 3), early=early)
