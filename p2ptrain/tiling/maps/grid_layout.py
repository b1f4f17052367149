"""A grid of tiles over a network, divided into groups: what each tile owns, needs and sends.

A group is a run of units. At its beginning every tile has what it owns of each map that enters the
group, and gets from its neighbours what it needs besides (the halo). Inside, it computes all that
its own part of the group's outputs depends on, also where a neighbour computes the same. What it
gives at the end is cut to what it owns.

The way back is the way forward transposed: a tile's gradient of a map that entered has the shape of
`required`; what lies in a neighbour's part is sent there and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.feature_maps import AxisSpan, MapNetwork, Region
from p2ptrain.tiling.maps.grid import GroupLayout, HaloGroup, HaloTransfer, TileGrid


class GridLayout:
    """See the module. Tiles are numbered row by row.

    Attributes:
        network, grid: as given.
        groups: between the borders.
    """

    def __init__(
        self,
        network: MapNetwork,
        weights: tuple[Sequence[float], Sequence[float]],
        borders: Sequence[int],
        *,
        aligned: bool = True,
    ) -> None:
        """Lay the grid out.

        Args:
            network: the tiled part.
            weights: of the grid's rows and of its columns; equal tiles have equal weights.
            borders: of the groups in units, from 0 to the number of units, ascending.
            aligned: how lines are carried from map to map, see `lines`.

        Raises:
            GridError: the grid does not fit a map, or a tile is narrower than a halo.
            OptionError: `borders` are none.
        """
        check_borders(network, borders)
        self.network = network
        self.grid = TileGrid(network, weights, aligned=aligned)
        self._laid = tuple(GroupLayout(self.grid, first, end) for first, end in pairwise(borders))
        self.groups: tuple[HaloGroup, ...] = tuple(laid.group for laid in self._laid)

    @property
    def tiles(self) -> int:
        """How many."""
        return self.grid.tiles

    def owned(self, tile: int, number: int) -> Region:
        """What a tile owns of a map; the tiles' parts cover the map once."""
        return self.grid.owned(tile, number)

    def required(self, group: int, tile: int, number: int) -> Region:
        """What a tile has of a map inside a group; KeyError where the group does not use it."""
        return self._laid[group].required(tile, number)

    def is_used(self, group: int, number: int) -> bool:
        """Whether anything in the group depends on the map; else it is not even computed."""
        return self._laid[group].is_used(number)

    def input_region(self, tile: int, number: int) -> Region:
        """What a tile gets of one of the model's inputs: all that it ever needs of it."""
        whole = Region(AxisSpan(0, 0), AxisSpan(0, 0))
        for laid in self._laid:
            if laid.is_used(number):
                whole = whole.hull(laid.required(tile, number))
        return whole

    @cached_property
    def transfers(self) -> tuple[tuple[HaloTransfer, ...], ...]:
        """By group: all pieces of halos at its beginning, by map, receiver and sender."""
        return tuple(laid.transfers for laid in self._laid)


def check_borders(network: MapNetwork, borders: Sequence[int]) -> None:
    """That groups follow each other from unit 0 to the last.

    Raises:
        OptionError: they do not.
    """
    if (
        len(borders) < 2
        or borders[0] != 0
        or borders[-1] != len(network.units)
        or any(first >= end for first, end in pairwise(borders))
    ):
        raise OptionError(
            f"groups must follow each other from unit 0 to the last of {len(network.units)}, "
            f"found the borders {list(borders)}"
        )
