"""What tiles hold twice: a map with its halo is put together in new memory, beside the own part.

Both stay until the backward: the own part as what the group before gave, the whole as what the
group behind has read. Where that begins with a normalisation, which keeps the whole, only the whole
stays: as much as planners count of the own part, and the halo. Planners do not count either, as
costs of a grouping are sums of its groups' shares of what whole maps take; it is added to what a
plan needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from p2ptrain.tiles.grid import GroupLayout, TileGrid, first_normalised
from p2ptrain.tiles.network import MapNetwork
from p2ptrain.tiles.shape import TileShape, owners


def copied_bytes(network: MapNetwork, shape: TileShape, shares: Sequence[int]) -> tuple[int, ...]:
    """Of one sample, by device; `shares`: tiles of each, in row order. Raises GridError."""
    tiled = network.first_units(shape.units).with_early(shape.early)
    grid = TileGrid(tiled, (shape.rows, shape.columns), aligned=shape.aligned)
    found, device_of = [0] * len(shares), owners(shares)
    for first, end in pairwise(shape.borders):
        laid = GroupLayout(grid, first, end)
        normalised = first_normalised(laid)
        for receiver, number in {(one.receiver, one.map) for one in laid.transfers}:
            area = laid.required(receiver, number).area
            if number == normalised:
                area -= grid.owned(receiver, number).area
            found[device_of[receiver]] += tiled.bytes_per_position((number,)) * area
    return tuple(found)
