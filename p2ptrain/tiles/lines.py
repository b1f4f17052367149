"""Where the cut lines of a grid lie on every map: who owns what, along one axis.

Rows and columns are cut independently, by straight lines through the whole map. Two ways:

    aligned        lines on the last map, carried back through the windows: where windows do not
                   overlap (2x2 pooling) the halo is empty
    proportional   lines on each map at the same fractions of it: tiles are as equal as the map's
                   own size allows, even where the last map is small
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.tiles.network import Axis, MapNetwork
from p2ptrain.tiles.span import Span

Lines = tuple[int, ...]
"""0, the inner lines ascending, the size: tile i owns positions [lines[i], lines[i + 1])."""


class GridError(PlanError):
    """The grid or its groups do not fit the model's maps; names the unit."""


def lines_by_weight(size: int, weights: Sequence[float]) -> Lines:
    """Lines of one map of `size` positions, tiles in proportion to `weights`.

    Every tile has at least one position where there are enough.

    Raises:
        OptionError: no weights, or one that is not above 0.
    """
    if not weights or any(not 0 < weight < float("inf") for weight in weights):
        raise OptionError(f"tiles need weights above 0, found {list(weights)}")
    whole, count = sum(weights), len(weights)
    lines = [round(size * part / whole) for part in accumulate(weights, initial=0.0)]
    lines[0], lines[-1] = 0, size
    for i in range(1, count):
        lines[i] = max(lines[i], lines[i - 1] + 1)
    for i in range(count - 1, 0, -1):
        lines[i] = max(min(lines[i], lines[i + 1] - 1), 0)
    return tuple(lines)


def map_lines(
    network: MapNetwork, axis: Axis, weights: Sequence[float], *, aligned: bool = True
) -> tuple[Lines, ...]:
    """Lines of every map along one axis.

    Args:
        network: the tiled part.
        axis: which.
        weights: one a row (or column) of the grid: how much of the map it gets.
        aligned: see the module.

    Raises:
        GridError: some map has fewer positions than the grid has rows (or columns), or aligned
            lines leave a tile without any position.
    """
    for number, feature_map in enumerate(network.maps):
        if feature_map.size(axis) < len(weights):
            raise GridError(
                f"a grid of {len(weights)} {axis} does not fit the map of "
                f"{network.made_by(number)}, which has {feature_map.size(axis)} {axis}. "
                f"Take fewer {axis}, or compute fewer layers in tiles"
            )
    lines: list[Lines | None] = [None] * len(network.maps)
    if aligned:
        _carry_back(network, axis, weights, lines)
    for number, feature_map in enumerate(network.maps):
        found = lines[number]
        if found is None:
            found = lines[number] = lines_by_weight(feature_map.size(axis), weights)
        _check(network, number, axis, found)
    return tuple(found for found in lines if found is not None)


def owned(lines: Lines, index: int) -> Span:
    """What the tile at `index` along the axis owns."""
    return Span(lines[index], lines[index + 1])


def _carry_back(
    network: MapNetwork, axis: Axis, weights: Sequence[float], lines: list[Lines | None]
) -> None:
    for operation in reversed(network.operations):
        output = operation.output
        after = lines[output]
        if after is None:
            size = network.maps[output].size(axis)
            after = lines[output] = lines_by_weight(size, weights)
        for read in operation.inputs:
            if lines[read] is None:
                size, window = network.maps[read].size(axis), operation.window(axis)
                inner = (window.line_before(line, size) for line in after[1:-1])
                lines[read] = (0, *inner, size)


def _check(network: MapNetwork, number: int, axis: Axis, lines: Lines) -> None:
    if all(first < end for first, end in pairwise(lines)):
        return
    raise GridError(
        f"lines carried back to the map of {network.made_by(number)} would be at {list(lines)}, "
        f"which leaves a tile without any of its {axis}. Take fewer {axis}, or lines in proportion"
    )
