"""A grid of tiles over a network, in groups of units: what each tile owns, needs and sends.

Rows and columns are cut independently, by straight lines through the whole map. The lines are drawn
in one of two ways:

    aligned        lines on the last map, carried back through the windows: where windows do not
                   overlap (2x2 pooling) the halo is empty
    proportional   lines on each map at the same fractions of it: tiles are as equal as the map's
                   own size allows, even where the last map is small

A group is a run of units. At its beginning every tile has what it owns of each map that enters the
group, and gets from its neighbours what it needs besides (the halo). Inside, it computes all that
its own part of the group's outputs depends on, also where a neighbour computes the same. What it
gives at the end is cut to what it owns.

The way back is the way forward transposed: a tile's gradient of a map that entered has the shape of
`required`; what lies in a neighbour's part is sent there and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from p2ptrain.errors import OptionError, PlanError
from p2ptrain.plan.types.feature_maps import Axis, AxisSpan, MapNetwork, Operation, Region

AXES: tuple[Axis, Axis] = ("rows", "columns")

_Spans = dict[int, tuple[AxisSpan, ...]]
"""Map -> what the tile at each place along an axis requires of it."""


@dataclass(frozen=True, slots=True)
class HaloTransfer:
    """Tile `sender` sends `region` of map number `map` to tile `receiver`: one piece of a halo.

    On the way back the gradient of the same region goes from `receiver` to `sender`.
    """

    sender: int
    receiver: int
    map: int
    region: Region


@dataclass(frozen=True, slots=True)
class HaloGroup:
    """Units [first, end) without an exchange of halos in between.

    Attributes:
        entering: maps it reads that it does not make, ascending.
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
    def transfers(self) -> tuple[HaloTransfer, ...]:
        """All pieces of halos at its beginning, by map, receiver and sender."""
        return tuple(
            transfer
            for number in self.group.entering
            if self.is_used(number) and number not in self.grid.network.entering
            for receiver in range(self.grid.tiles)
            for transfer in self._pieces(receiver, number)
        )

    def _pieces(self, receiver: int, number: int) -> list[HaloTransfer]:
        needed = self.required(receiver, number)
        row, column = self.grid.place(receiver)
        rows, columns = self.grid.shape
        found = []
        for r in range(max(row - 1, 0), min(row + 2, rows)):
            for c in range(max(column - 1, 0), min(column + 2, columns)):
                sender = r * columns + c
                region = needed.intersection(self.grid.owned(sender, number))
                if sender != receiver and region.area:
                    found.append(HaloTransfer(sender, receiver, number, region))
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

    def _owned(self, axis: Axis, number: int) -> tuple[AxisSpan, ...]:
        lines = self.grid.lines(axis, number)
        return tuple(owned(lines, index) for index in range(len(lines) - 1))

    def _check_neighbours(self, axis: Axis, number: int, spans: tuple[AxisSpan, ...]) -> None:
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


def group_of(network: MapNetwork, first: int, end: int) -> HaloGroup:
    """Units [first, end) as a group."""
    operations: tuple[Operation, ...] = network.operations_of(first, end)
    made = {operation.output for operation in operations}
    read = {number for operation in operations for number in operation.inputs}
    last = network.last_unit_of_map
    leaving = (number for number in sorted(made) if last[number] >= end)
    return HaloGroup(first, end, tuple(sorted(read - made)), tuple(leaving))


def first_normalised(laid: GroupLayout) -> int | None:
    """The map of other groups of which a group takes statistics before anything else."""
    network, group = laid.grid.network, laid.group
    operations = network.operations_of(group.first, group.end)
    first = next((k for k in operations if laid.is_used(k.output)), None)
    if first is None or not first.statistics or first.inputs[0] in network.entering:
        return None
    return first.inputs[0] if first.inputs[0] in group.entering else None


def _include(spans: _Spans, number: int, more: tuple[AxisSpan, ...]) -> None:
    known = spans.get(number)
    if known is None:
        spans[number] = more
    else:
        spans[number] = tuple(a.hull(b) for a, b in zip(known, more, strict=True))


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


def owned(lines: Lines, index: int) -> AxisSpan:
    """What the tile at `index` along the axis owns."""
    return AxisSpan(lines[index], lines[index + 1])


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
