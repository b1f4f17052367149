"""The feature maps of a model's tiled part, and the operators between them, as plain data.

Every operator makes one map from one or several, position by position or by windows. Operators of
several inputs (additions, concatenations of channels) read the same position of each.

A window of kernel k, stride s, dilation d and `before` padded positions reads, for output o along
one axis,

    o s - before + d j        for j = 0, ..., k - 1

so outputs [a, b) read [a s - before, (b - 1) s - before + d (k - 1) + 1). Positions outside of the
map are padding; inside of it they belong to some tile, so a tile pads only at the map's own border.
(Equations 1 and 2 of Rama et al., "Distributed Convolutional Neural Network Training on Mobile and
Edge Clusters", section 4.2, are the case of an odd kernel, padding k // 2 and no dilation.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By, Count, Length, Positive, Range, Row, Seconds, Text

MAX_MAPS = 20_000

AnyName: TypeAlias = Annotated[str, Text(4096)]

Axis: TypeAlias = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """One value of the tiled part: channels x height x width for every sample.

    Attributes:
        differentiable: whether a gradient flows back through it.
    """

    name: AnyName
    channels: Positive
    height: Positive
    width: Positive
    differentiable: bool = True

    def size(self, axis: Axis) -> int:
        """Positions along one axis."""
        return self.height if axis == "rows" else self.width


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator.

    Attributes:
        name: of the node, to be shown.
        inputs: numbers of the maps it reads.
        output: number of the map it makes.
        rows, columns: what an output position reads of every input.
        statistics: it normalises by mean and variance over all positions of all samples.
        flops: operations of a forward pass for one output position of one sample, all channels.
    """

    name: AnyName
    inputs: Annotated[tuple[Count, ...], Length(MAX_MAPS, 1)]
    output: Count
    rows: Annotated[AxisWindow, Row()]
    columns: Annotated[AxisWindow, Row()]
    statistics: bool = False
    flops: Seconds = 0.0

    def window(self, axis: Axis) -> AxisWindow:
        """Of one axis."""
        return self.rows if axis == "rows" else self.columns


@dataclass(frozen=True, slots=True)
class MapUnit:
    """One unit of the model, as far as it is tiled.

    Attributes:
        first, end: [first, end) of its operations.
        parameter_bytes: of its filters and other parameters.
        frozen_bytes: of those of them that take no gradients.
    """

    name: AnyName
    first: Count
    end: Count
    parameter_bytes: Count = 0
    frozen_bytes: Count = 0

    def __post_init__(self) -> None:
        if self.frozen_bytes > self.parameter_bytes:
            raise OptionError("frozen_bytes: more than parameter_bytes")


@dataclass(frozen=True)
class MapNetwork:
    """All maps and operators of the tiled part, in the order in which they run.

    Attributes:
        entering: maps that come from outside: the model's inputs.
        leaving: maps that are used behind the tiled part.
        itemsize: bytes of one element.
        least: the tiled part may end behind so many units, or more: those in front of that read
            what enters, which tiles alone have.
    """

    maps: Annotated[tuple[Annotated[FeatureMap, Row()], ...], Length(MAX_MAPS)]
    operations: Annotated[tuple[Annotated[Operation, Row()], ...], Length(MAX_MAPS)]
    units: Annotated[tuple[Annotated[MapUnit, Row()], ...], Length(MAX_MAPS, 1)]
    entering: Annotated[tuple[Count, ...], Length(MAX_MAPS)]
    leaving: Annotated[tuple[Count, ...], Length(MAX_MAPS)]
    itemsize: Annotated[int, Range(1, 16)] = 4
    least: Positive = 1

    def operations_of(self, first: int, end: int) -> tuple[Operation, ...]:
        """Of units [first, end)."""
        return self.operations[self.units[first].first : self.units[end - 1].end]

    def first_units(self, count: int) -> MapNetwork:
        """The network of the first `count` units, 1 or more."""
        units = self.units[:count]
        operations = self.operations[: units[-1].end]
        known = 1 + max(operation.output for operation in operations)
        last = self.last_unit_of_map
        made = (operation.output for operation in operations)
        return MapNetwork(
            maps=self.maps[:known],
            operations=operations,
            units=units,
            entering=tuple(number for number in self.entering if number < known),
            leaving=tuple(number for number in sorted(made) if last[number] >= count),
            itemsize=self.itemsize,
            least=self.least,
        )

    def with_early(self, borders: Iterable[int]) -> MapNetwork:
        """The same operators, but units meet earlier at some borders.

        There the unit in front ends before its last operator that takes statistics, which begins
        the next one: what all tiles must tell each other of that map, and its halo, can then
        travel together. Borders where nothing moves (`may_be_early`) stay.
        """
        units = list(self.units)
        for border in borders:
            first = self._early(border)
            if first is not None:
                units[border - 1] = replace(units[border - 1], end=first)
                units[border] = replace(units[border], first=first)
        return replace(self, units=tuple(units))

    def may_be_early(self, border: int) -> bool:
        """Whether `with_early` moves the border between units `border` - 1 and `border`."""
        return self._early(border) is not None

    def _early(self, border: int) -> int | None:
        """The operation with which the unit behind would begin."""
        if not 0 < border < len(self.units):
            return None
        unit = self.units[border - 1]
        found = (
            k for k in reversed(range(unit.first + 1, unit.end)) if self.operations[k].statistics
        )
        return next(found, None)

    @cached_property
    def unit_of_map(self) -> tuple[int | None, ...]:
        """By map: the unit that makes it; None for what enters."""
        made: list[int | None] = [None] * len(self.maps)
        for number, unit in enumerate(self.units):
            for operation in self.operations[unit.first : unit.end]:
                made[operation.output] = number
        return tuple(made)

    @cached_property
    def last_unit_of_map(self) -> tuple[int, ...]:
        """By map: the last unit that reads it; the number of units where it leaves; -1: none."""
        last = [-1] * len(self.maps)
        for number, unit in enumerate(self.units):
            for operation in self.operations[unit.first : unit.end]:
                for read in operation.inputs:
                    last[read] = number
        for leaving in self.leaving:
            last[leaving] = len(self.units)
        return tuple(last)

    def reached_back_from(self, maps: Iterable[int]) -> frozenset[int]:
        """Maps to which gradients of these flow back, differentiable ones; these among them."""
        reached = {number for number in maps if self.maps[number].differentiable}
        for operation in reversed(self.operations):
            if operation.output in reached:
                reached.update(n for n in operation.inputs if self.maps[n].differentiable)
        return frozenset(reached)

    def made_by(self, number: int) -> str:
        """What to call a map in an error: the unit that makes it."""
        unit = self.unit_of_map[number]
        return "the model's input" if unit is None else f"layer {self.units[unit].name}"

    def bytes_per_position(self, maps: Iterable[int]) -> int:
        """Of one position of one sample, all channels of these maps."""
        return self.itemsize * sum(self.maps[number].channels for number in maps)


@dataclass(frozen=True, slots=True)
class AxisWindow:
    """One axis of an operator; the default is an element-wise one.

    Attributes:
        before, after: padded positions at the map's two ends.
    """

    kernel: Positive = 1
    stride: Positive = 1
    dilation: Positive = 1
    before: Count = 0
    after: Count = 0

    @property
    def extent(self) -> int:
        """Positions from the first that an output reads to the last, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int, *, ceil_mode: bool = False) -> int:
        """Output positions of a map of `size`; below 1 where the window does not fit.

        With `ceil_mode` the last window may stand over the map's end, but begins in the map or in
        the padding before it.
        """
        free = size + self.before + self.after - self.extent
        if not ceil_mode:
            return free // self.stride + 1
        count = -(-free // self.stride) + 1
        if (count - 1) * self.stride >= size + self.before:
            count -= 1
        return count

    def reads(self, outputs: AxisSpan) -> AxisSpan:
        """What `outputs` read, padding included."""
        if outputs.size == 0:
            return AxisSpan(0, 0)
        first = outputs.first * self.stride - self.before
        last = (outputs.end - 1) * self.stride - self.before
        return AxisSpan(first, last + self.extent)

    def needed(self, outputs: AxisSpan, size: int) -> AxisSpan:
        """What `outputs` read of the map; empty where that is nothing but padding."""
        read = self.reads(outputs)
        first = min(max(read.first, 0), size)
        return AxisSpan(first, min(max(read.end, first), size))

    def padding(self, outputs: AxisSpan, size: int) -> tuple[int, int]:
        """How many padded positions `outputs` read before the map, and after it."""
        read = self.reads(outputs)
        before = min(max(-read.first, 0), read.size)
        return before, min(max(read.end - size, 0), read.size - before)

    def taps(self, outputs: AxisSpan, counted: AxisSpan) -> tuple[int, ...]:
        """For each of `outputs`, how many of the positions that it reads lie in `counted`."""
        return tuple(
            sum(
                counted.first <= o * self.stride - self.before + self.dilation * j < counted.end
                for j in range(self.kernel)
            )
            for o in range(outputs.first, outputs.end)
        )

    def line_before(self, line: int, size: int) -> int:
        """Where to cut the input map for a cut of the output map before position `line`.

        Half-way between the centres of the two windows on either side, which divides the halo
        evenly; with windows that do not overlap there is then no halo at all.
        """
        doubled = (2 * line - 1) * self.stride - 2 * self.before + self.extent
        return min(max(-(-doubled // 2), 0), size)


ELEMENTWISE = AxisWindow()


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """Positions first, first + 1, ..., end - 1 of one axis; empty where end == first."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """How many positions."""
        return self.end - self.first

    def intersection(self, other: AxisSpan) -> AxisSpan:
        """The positions in both; empty, and anywhere, where there are none."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return AxisSpan(first, max(first, end))

    def hull(self, other: AxisSpan) -> AxisSpan:
        """The shortest span with all positions of both."""
        if self.size == 0:
            return other
        if other.size == 0:
            return self
        return AxisSpan(min(self.first, other.first), max(self.end, other.end))

    def within(self, other: AxisSpan) -> slice:
        """Where this span lies in a tensor that holds `other`."""
        return slice(self.first - other.first, self.end - other.first)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a feature map."""

    rows: AxisSpan
    columns: AxisSpan

    @property
    def area(self) -> int:
        """How many positions."""
        return self.rows.size * self.columns.size

    def intersection(self, other: Region) -> Region:
        """The positions in both."""
        return Region(self.rows.intersection(other.rows), self.columns.intersection(other.columns))

    def hull(self, other: Region) -> Region:
        """The smallest rectangle around both."""
        if self.area == 0:
            return other
        if other.area == 0:
            return self
        return Region(self.rows.hull(other.rows), self.columns.hull(other.columns))

    def within(self, other: Region) -> tuple[slice, slice]:
        """Where this region lies in a tensor that holds `other`."""
        return self.rows.within(other.rows), self.columns.within(other.columns)


_WRONG = "a network of maps has maps, operations between them and units"


def _checked(network: MapNetwork) -> MapNetwork:
    """Operations read what is there before them, make maps in order, and units divide them."""
    made = [operation.output for operation in network.operations]
    known = set(network.entering)
    for operation in network.operations:
        if not known.issuperset(operation.inputs) or operation.output in known:
            raise OptionError(_WRONG)
        known.add(operation.output)
    if known != set(range(len(network.maps))) or made != sorted(made):
        raise OptionError(_WRONG)
    end = 0
    for unit in network.units:
        if unit.first != end or unit.end <= unit.first:
            raise OptionError(_WRONG)
        end = unit.end
    if end != len(network.operations) or not known.issuperset(network.leaving):
        raise OptionError(_WRONG)
    if not 0 < network.least <= len(network.units):
        raise OptionError(_WRONG)
    return network


MapsForm: TypeAlias = Annotated[MapNetwork, By(_checked, lambda network: network, MapNetwork)]
"""As it travels, for coordinators that do not have the model."""
