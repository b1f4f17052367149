"""A grid of tiles over a network, divided into groups: what each tile owns, needs and sends.

A group is a run of units. At its beginning every tile has what it owns of each map that enters the
group, and gets from its neighbours what it needs besides (the halo). Inside, it computes all that
its own part of the group's outputs depends on, also where a neighbour computes the same. What it
gives at the end is cut to what it owns.

    required(map) of a tile in a group = the smallest rectangle around
        what it owns of the map, if the map is used behind the group or statistics are taken of it
        what the group's operators read of the map for their own required outputs

The way back is the way forward transposed: a tile's gradient of a map that entered has the shape of
`required`; what lies in a neighbour's part is sent there and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from p2ptrain.errors import OptionError
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


class Layout:
    """See the module. Tiles are numbered row by row.

    Attributes:
        network, groups: as given.
        grid: (rows, columns).
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
        self.network = network
        self.grid = len(weights[0]), len(weights[1])
        self._lines: tuple[tuple[Lines, ...], tuple[Lines, ...]] = (
            map_lines(network, "rows", weights[0], aligned=aligned),
            map_lines(network, "columns", weights[1], aligned=aligned),
        )
        self.groups = divide(network, borders)
        self._required = tuple(
            (self._spans(group, "rows"), self._spans(group, "columns")) for group in self.groups
        )

    @property
    def tiles(self) -> int:
        """How many."""
        return self.grid[0] * self.grid[1]

    def place(self, tile: int) -> tuple[int, int]:
        """(row, column) of a tile."""
        return divmod(tile, self.grid[1])

    def owned(self, tile: int, number: int) -> Region:
        """What a tile owns of a map; the tiles' parts cover the map once."""
        row, column = self.place(tile)
        rows, columns = self._lines
        return Region(owned(rows[number], row), owned(columns[number], column))

    def required(self, group: int, tile: int, number: int) -> Region:
        """What a tile has of a map inside a group; KeyError where the group does not use it."""
        row, column = self.place(tile)
        rows, columns = self._required[group]
        return Region(rows[number][row], columns[number][column])

    def is_used(self, group: int, number: int) -> bool:
        """Whether anything in the group depends on the map; else it is not even computed."""
        return number in self._required[group][0]

    def input_region(self, tile: int, number: int) -> Region:
        """What a tile gets of one of the model's inputs: all that it ever needs of it."""
        regions = [
            self.required(group, tile, number)
            for group in range(len(self.groups))
            if self.is_used(group, number)
        ]
        whole = Region(Span(0, 0), Span(0, 0))
        for region in regions:
            whole = whole.hull(region)
        return whole

    @cached_property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """By group: all pieces of halos at its beginning, by map, receiver and sender."""
        return tuple(
            tuple(
                transfer
                for number in group.entering
                if number not in self.network.entering
                for receiver in range(self.tiles)
                for transfer in self._pieces(place, receiver, number)
            )
            for place, group in enumerate(self.groups)
        )

    def _pieces(self, group: int, receiver: int, number: int) -> list[Transfer]:
        needed = self.required(group, receiver, number)
        row, column = self.place(receiver)
        found = []
        for r in range(max(row - 1, 0), min(row + 2, self.grid[0])):
            for c in range(max(column - 1, 0), min(column + 2, self.grid[1])):
                sender = r * self.grid[1] + c
                region = needed.intersection(self.owned(sender, number))
                if sender != receiver and region.area:
                    found.append(Transfer(sender, receiver, number, region))
        return found

    # -- along one axis --------------------------------------------------------------------------

    def _spans(self, group: Group, axis: Axis) -> _Spans:
        """What every tile along the axis requires of each map that the group uses."""
        lines = self._lines[AXES.index(axis)]
        count = self.grid[AXES.index(axis)]
        spans: _Spans = {n: _all_owned(lines[n], count) for n in group.leaving}
        for operation in reversed(self.network.operations_of(group.first, group.end)):
            if operation.statistics:
                for number in (operation.output, operation.inputs[0]):
                    _include(spans, number, _all_owned(lines[number], count))
            outputs = spans.get(operation.output)
            if outputs is None:
                continue
            for number in operation.inputs:
                size, window = self.network.maps[number].size(axis), operation.window(axis)
                _include(spans, number, tuple(window.needed(span, size) for span in outputs))
        for number in group.entering:
            if number in spans and number not in self.network.entering:
                self._check_neighbours(group, axis, number, spans[number])
        return spans

    def _check_neighbours(
        self, group: Group, axis: Axis, number: int, spans: tuple[Span, ...]
    ) -> None:
        lines = self._lines[AXES.index(axis)][number]
        for index, span in enumerate(spans):
            low, high = lines[max(index - 1, 0)], lines[min(index + 2, len(lines) - 1)]
            if span.size and (span.first < low or span.end > high):
                units = self.network.units
                tiles = [end - first for first, end in pairwise(lines)]
                raise GridError(
                    f"tiles of {self.network.made_by(number)} have {tiles} {axis}, narrower than "
                    f"the halo that units {units[group.first].name} to {units[group.end - 1].name} "
                    f"need together: tile {index} needs {axis} {span.first} to {span.end - 1}, "
                    f"beyond its neighbours. Take fewer {axis}, or shorter groups"
                )


def divide(network: MapNetwork, borders: Sequence[int]) -> tuple[Group, ...]:
    """The groups between `borders`.

    Raises:
        OptionError: they do not ascend from 0 to the number of units.
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
    return tuple(_group(network, first, end) for first, end in pairwise(borders))


def _group(network: MapNetwork, first: int, end: int) -> Group:
    operations: tuple[Operation, ...] = network.operations_of(first, end)
    made = {operation.output for operation in operations}
    read = {number for operation in operations for number in operation.inputs}
    last = network.last_unit_of_map
    leaving = (number for number in sorted(made) if last[number] >= end)
    return Group(first, end, tuple(sorted(read - made)), tuple(leaving))


def _all_owned(lines: Lines, count: int) -> tuple[Span, ...]:
    return tuple(owned(lines, index) for index in range(count))


def _include(spans: _Spans, number: int, more: tuple[Span, ...]) -> None:
    known = spans.get(number)
    if known is None:
        spans[number] = more
    else:
        spans[number] = tuple(a.hull(b) for a, b in zip(known, more, strict=True))
