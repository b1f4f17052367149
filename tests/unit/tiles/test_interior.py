"""What a tile computes before its halos are there, held against sets of single positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from p2ptrain.tiles.grid import GroupLayout, TileGrid, Transfer
from p2ptrain.tiles.interior import NEVER, SPLITTING, Splitting, interior_of
from p2ptrain.tiles.layout import Layout
from p2ptrain.tiles.network import MapNetwork, Operation
from p2ptrain.tiles.span import Region, Span
from p2ptrain.tiles.window import ELEMENTWISE, Window
from tests.unit.tiles.networks import CHANNELS, chain
from tests.unit.tiles.test_layout import layouts

CONVOLUTION = Window(3, 1, 1, 1, 1)
WHEREVER = Splitting(least_part=0.0, least_operations=0.0)
HUNDREDS = 1000.0 * CHANNELS


def laid(network: MapNetwork, first: int, end: int, shape: tuple[int, int] = (1, 2)) -> GroupLayout:
    grid = TileGrid(network, ((1.0,) * shape[0], (1.0,) * shape[1]))
    return GroupLayout(grid, first, end)


def region(rows: tuple[int, int], columns: tuple[int, int]) -> Region:
    return Region(Span(*rows), Span(*columns))


def test_a_convolution_s_interior_and_strips_by_hand() -> None:
    network = chain([ELEMENTWISE, CONVOLUTION, CONVOLUTION], 80, flops=HUNDREDS)
    found = interior_of(laid(network, 1, 2), 0, SPLITTING)
    assert found is not None
    assert (found.operation, found.map) == (1, 1)
    assert found.outputs == region((0, 80), (0, 40))
    assert found.inner == region((0, 80), (0, 39))
    assert found.strips == (region((0, 80), (39, 40)),)
    both = interior_of(laid(network, 1, 3, (3, 3)), 4, WHEREVER)
    assert both is not None
    assert both.outputs == region((26, 54), (26, 54))
    assert both.inner == region((28, 52), (28, 52))
    assert both.strips == (
        *(region((26, 28), (26, 54)), region((52, 54), (26, 54))),
        *(region((28, 52), (26, 28)), region((28, 52), (52, 54))),
    )


class Counted(tuple[Transfer, ...]):
    """Counts how often one of them is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Transfer]:
        for transfer in super().__iter__():
            Counted.looks += 1
            yield transfer


def test_a_large_grid_s_transfers_are_looked_at_once_for_all_tiles() -> None:
    """Once for each tile they were most of what planning 32x32 tiles took."""
    group = laid(chain([ELEMENTWISE, CONVOLUTION], 80, flops=HUNDREDS), 1, 2, (10, 10))
    transfers = group.transfers
    group.__dict__["transfers"] = Counted(transfers)
    found = [interior_of(group, tile, WHEREVER) for tile in range(100)]
    assert None not in found
    assert Counted.looks == len(transfers)
    assert {(t.sender, t.receiver) for t in transfers} == {
        (sender, receiver) for receiver in range(100) for sender in group.senders[receiver]
    }


def positions(found: Region) -> set[tuple[int, int]]:
    rows, columns = range(found.rows.first, found.rows.end), found.columns
    return {(r, c) for r in rows for c in range(columns.first, columns.end)}


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_interior_reads_nothing_of_others_and_is_all_that_does(layout: Layout) -> None:
    for place in range(len(layout.groups)):
        for tile in range(layout.tiles):
            found = layout.interior(place, tile, WHEREVER)
            if found is None:
                continue
            operation = layout.network.operations[found.operation]
            source, owned = layout.network.maps[found.map], layout.owned(tile, found.map)
            strips = [positions(strip) for strip in found.strips]
            assert set().union(positions(found.inner), *strips) == positions(found.outputs)
            assert found.outputs.area == found.inner.area + sum(map(len, strips))
            for axis in ("rows", "columns"):
                window = operation.rows if axis == "rows" else operation.columns
                mine: Span = getattr(owned, axis)
                outputs: Span = getattr(found.outputs, axis)
                inner: Span = getattr(found.inner, axis)
                for output in range(outputs.first, outputs.end):
                    read = window.needed(Span(output, output + 1), source.size(axis))
                    is_own = mine.first <= read.first and read.end <= mine.end
                    assert (inner.first <= output < inner.end) == is_own or not read.size


def changed(network: MapNetwork, k: int, **fields: object) -> MapNetwork:
    operations = list(network.operations)
    operations[k] = replace(operations[k], **fields)  # type: ignore[arg-type]
    return replace(network, operations=tuple(operations))


@pytest.mark.parametrize(
    "network",
    [
        chain([ELEMENTWISE, CONVOLUTION], 80, flops=10.0 * CHANNELS),  # a pooling has no more
        chain([ELEMENTWISE, CONVOLUTION], 30, flops=HUNDREDS),  # a strip is a fifteenth
        changed(chain([ELEMENTWISE, CONVOLUTION], 80, flops=HUNDREDS), 1, statistics=True),
        chain([ELEMENTWISE, ELEMENTWISE], 80, flops=HUNDREDS),  # no halo at all
    ],
    ids=["little work", "thick strips", "statistics", "no halo"],
)
def test_where_it_does_not_pay_all_waits(network: MapNetwork) -> None:
    assert interior_of(laid(network, 1, 2), 0, SPLITTING) is None


def test_what_reads_two_maps_waits() -> None:
    network = chain([CONVOLUTION, CONVOLUTION, CONVOLUTION], 80, flops=HUNDREDS)
    both = replace(network.operations[2], inputs=(2, 1))
    network = replace(network, operations=(*network.operations[:2], both))
    assert interior_of(laid(network, 2, 3), 0, SPLITTING) is None
    assert interior_of(laid(network, 1, 2), 0, SPLITTING) is not None
    assert interior_of(laid(network, 1, 2), 0, SPLITTING.at([1])) is not None
    assert interior_of(laid(network, 1, 2), 0, SPLITTING.at([0, 2])) is None
    assert interior_of(laid(network, 1, 2), 0, NEVER) is None
    assert interior_of(laid(network, 0, 1), 0, SPLITTING) is None  # the images have no halo
    assert interior_of(laid(network, 1, 2), 0, SPLITTING, beside=(0, 1)) is None  # nor those


def test_tiles_narrower_than_their_halo_have_no_interior() -> None:
    wide = Window(7, 1, 1, 3, 3)
    network = chain([ELEMENTWISE, wide], 12, flops=HUNDREDS)
    grid = TileGrid(network, ((1.0,), (1.0, 1.0, 1.0)))
    found = [interior_of(GroupLayout(grid, 1, 2), tile, WHEREVER) for tile in range(3)]
    assert [None if one is None else one.inner.columns for one in found] == [
        Span(0, 1),
        None,
        Span(11, 12),
    ]


def test_a_residual_block_begins_with_its_first_convolution() -> None:
    network = chain([ELEMENTWISE, CONVOLUTION, CONVOLUTION], 80, flops=HUNDREDS)
    plus = Operation("add", (3, 1), 4, ELEMENTWISE, ELEMENTWISE, flops=1.0)
    network = replace(
        network,
        maps=(*network.maps, replace(network.maps[3], name="sum")),
        operations=(*network.operations, plus),
        units=(*network.units[:2], replace(network.units[2], end=4)),
        leaving=(4,),
    )
    found = interior_of(laid(network, 1, 3), 0, SPLITTING)
    assert found is not None
    assert (found.operation, found.map) == (1, 1)
    assert found.outputs.columns == Span(0, 41)
    assert found.inner.columns == Span(0, 39)
