"""A grid of tiles over a network: what each owns, and what a group of units needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from p2ptrain.tiles.lines import GridError, Lines, map_lines, owned
from p2ptrain.tiles.network import Axis, MapNetwork, Operation
from p2ptrain.tiles.span import Region, Span

AXES: tuple[Axis, Axis] = ("rows", "columns")

_Spans = dict[int, tuple[Span, ...]]
"""Map -> what the tile at each place along an axis requires of it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tile `sender` sends `region` of map number `map` to tile `receiver`: one piece of a halo.

    On the way back the gradient of the same region goes from `receiver` to `sender`.
    """

    sender: int
    receiver: int
    map: int
    region: Region


@dataclass(frozen=True, slots=True)
class Group:
    """Units [first, end) without an exchange of halos in between.

    Attributes:
        entering: maps it reads that other groups (or nobody) made, ascending.
        leaving: maps it makes that are used behind it, ascending.
    """

    first: int
    end: int
    entering: tuple[int, ...]
    leaving: tuple[int, ...]


class TileGrid:
    """Tiles are numbered row by row.

    Attributes:
        network: as given.
        shape: (rows, columns).
    """

    def __init__(
        self,
        network: MapNetwork,
        weights: tuple[Sequence[float], Sequence[float]],
        *,
        aligned: bool = True,
    ) -> None:
        """Draw the lines.

        Args:
            network: the tiled part.
            weights: of the grid's rows and of its columns; equal tiles have equal weights.
            aligned: how lines are carried from map to map, see `lines`.

        Raises:
            GridError: the grid does not fit a map.
        """
        self.network = network
        self.shape = len(weights[0]), len(weights[1])
        self._lines: tuple[tuple[Lines, ...], tuple[Lines, ...]] = (
            map_lines(network, "rows", weights[0], aligned=aligned),
            map_lines(network, "columns", weights[1], aligned=aligned),
        )

    def over(self, network: MapNetwork) -> TileGrid:
        """The same lines for other units of the same maps."""
        other = copy(self)
        other.network = network
        return other

    @property
    def tiles(self) -> int:
        """How many."""
        return self.shape[0] * self.shape[1]

    def place(self, tile: int) -> tuple[int, int]:
        """(row, column) of a tile."""
        return divmod(tile, self.shape[1])

    def owned(self, tile: int, number: int) -> Region:
        """What a tile owns of a map; the tiles' parts cover the map once."""
        row, column = self.place(tile)
        rows, columns = self._lines
        return Region(owned(rows[number], row), owned(columns[number], column))

    def lines(self, axis: Axis, number: int) -> Lines:
        """Of a map."""
        return self._lines[AXES.index(axis)][number]


class GroupLayout:
    """One group on a grid: what tiles have of every map inside it, and what they send before.

    A tile's required part of a map is the smallest rectangle around

        what it owns of the map, if the map is used behind the group or statistics are taken of it
        what the group's operators read of the map for their own required outputs

    Attributes:
        grid, group: as given.
    """

    def __init__(self, grid: TileGrid, first: int, end: int) -> None:
        """Work out units [first, end).

        Raises:
            GridError: a tile is narrower than a halo.
        """
        self.grid = grid
        self.group = group_of(grid.network, first, end)
        self._required = self._spans("rows"), self._spans("columns")

    def required(self, tile: int, number: int) -> Region:
        """What a tile has of a map inside the group; KeyError where the group does not use it."""
        row, column = self.grid.place(tile)
        rows, columns = self._required
        return Region(rows[number][row], columns[number][column])

    def is_used(self, number: int) -> bool:
        """Whether anything in the group depends on the map; else it is not even computed."""
        return number in self._required[0]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All pieces of halos at its beginning, by map, receiver and sender."""
        return tuple(
            transfer
            for number in self.group.entering
            if self.is_used(number) and number not in self.grid.network.entering
            for receiver in range(self.grid.tiles)
            for transfer in self._pieces(receiver, number)
        )

    def _pieces(self, receiver: int, number: int) -> list[Transfer]:
        needed = self.required(receiver, number)
        row, column = self.grid.place(receiver)
        rows, columns = self.grid.shape
        found = []
        for r in range(max(row - 1, 0), min(row + 2, rows)):
            for c in range(max(column - 1, 0), min(column + 2, columns)):
                sender = r * columns + c
                region = needed.intersection(self.grid.owned(sender, number))
                if sender != receiver and region.area:
                    found.append(Transfer(sender, receiver, number, region))
        return found

    # -- along one axis --------------------------------------------------------------------------

    def _spans(self, axis: Axis) -> _Spans:
        """What every tile along the axis requires of each map that the group uses."""
        network, group = self.grid.network, self.group
        spans: _Spans = {number: self._owned(axis, number) for number in group.leaving}
        for operation in reversed(network.operations_of(group.first, group.end)):
            if operation.statistics:
                for number in (operation.output, operation.inputs[0]):
                    _include(spans, number, self._owned(axis, number))
            outputs = spans.get(operation.output)
            if outputs is None:
                continue
            for number in operation.inputs:
                size, window = network.maps[number].size(axis), operation.window(axis)
                _include(spans, number, tuple(window.needed(span, size) for span in outputs))
        for number in group.entering:
            if number in spans and number not in network.entering:
                self._check_neighbours(axis, number, spans[number])
        return spans

    def _owned(self, axis: Axis, number: int) -> tuple[Span, ...]:
        lines = self.grid.lines(axis, number)
        return tuple(owned(lines, index) for index in range(len(lines) - 1))

    def _check_neighbours(self, axis: Axis, number: int, spans: tuple[Span, ...]) -> None:
        lines = self.grid.lines(axis, number)
        for index, span in enumerate(spans):
            low, high = lines[max(index - 1, 0)], lines[min(index + 2, len(lines) - 1)]
            if span.size and (span.first < low or span.end > high):
                network, group = self.grid.network, self.group
                first, last = network.units[group.first], network.units[group.end - 1]
                tiles = [end - first for first, end in pairwise(lines)]
                who = f"layers {first.name} to {last.name} need together"
                advice = f"Take fewer {axis}, or shorter groups"
                if first is last:
                    who, advice = f"layer {first.name} needs", f"Take fewer {axis}"
                raise GridError(
                    f"tiles of {network.made_by(number)} have {tiles} {axis}, narrower than "
                    f"the halo that {who}: tile {index} needs {axis} {span.first} to "
                    f"{span.end - 1}, beyond its neighbours. {advice}"
                )


def group_of(network: MapNetwork, first: int, end: int) -> Group:
    """Units [first, end) as a group."""
    operations: tuple[Operation, ...] = network.operations_of(first, end)
    made = {operation.output for operation in operations}
    read = {number for operation in operations for number in operation.inputs}
    last = network.last_unit_of_map
    leaving = (number for number in sorted(made) if last[number] >= end)
    return Group(first, end, tuple(sorted(read - made)), tuple(leaving))


def first_normalised(laid: GroupLayout) -> int | None:
    """The map of other groups of which a group takes statistics before anything else."""
    network, group = laid.grid.network, laid.group
    operations = network.operations_of(group.first, group.end)
    first = next((k for k in operations if laid.is_used(k.output)), None)
    if first is None or not first.statistics or first.inputs[0] in network.entering:
        return None
    return first.inputs[0] if first.inputs[0] in group.entering else None


def _include(spans: _Spans, number: int, more: tuple[Span, ...]) -> None:
    known = spans.get(number)
    if known is None:
        spans[number] = more
    else:
        spans[number] = tuple(a.hull(b) for a, b in zip(known, more, strict=True))
