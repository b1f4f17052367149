"""What of a group's first operator a tile computes while its halos are on their way.

Of the outputs of a convolution, most depend on nothing but what the tile owns:

    +-----------+--+
    |           |  |      inner: reads the tile's own part, or padding at the map's own border
    |   inner   |  |      strips: read a halo, up to four of them; computed when it is there
    |           |  |
    +-----------+--+
    +--------------+

Thin strips are computed slowly, so it is done only where they are few, and where a planner finds
that the halo takes longer. Planners and devices ask here; no bit depends on when a message comes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from p2ptrain.tiles.grid import GroupLayout
from p2ptrain.tiles.network import Operation
from p2ptrain.tiles.span import Region, Span
from p2ptrain.tiles.window import Window


@dataclass(frozen=True, slots=True)
class Splitting:
    """Where a first operator is computed in two parts.

    Attributes:
        least_part: of its outputs on the tile, that need no halo.
        least_operations: for each element that it makes: convolutions over channels have hundreds,
            poolings and depthwise convolutions so few that there is nothing to gain.
        strip_cost: what it costs beyond doing all at once, by the strips' part of the outputs.
        groups: units with which groups begin where it pays; None = not decided, so wherever else
            it may be done.
    """

    least_part: float = 0.95
    least_operations: float = 100.0
    strip_cost: float = 3.0
    groups: frozenset[int] | None = None

    def at(self, groups: Iterable[int]) -> Splitting:
        """The same for groups that begin with these units only."""
        return replace(self, groups=frozenset(groups))


SPLITTING = Splitting()
NEVER = Splitting(least_part=2.0)
"""Everything waits for the halos."""


@dataclass(frozen=True, slots=True)
class Interior:
    """Of one group on one tile.

    Attributes:
        operation: the number of the first operator that is used.
        map: the only one that it reads.
        own: what it reads of the tile's own part of that map.
        outputs: what it makes of its output map.
        inner: what of that needs no halo.
    """

    operation: int
    map: int
    own: Region
    outputs: Region
    inner: Region

    @property
    def strips(self) -> tuple[Region, ...]:
        """The rest: above and below over all columns, then left and right; none of them empty."""
        rows, columns = self.outputs.rows, self.outputs.columns
        within = self.inner.rows
        found = (
            Region(Span(rows.first, within.first), columns),
            Region(Span(within.end, rows.end), columns),
            Region(within, Span(columns.first, self.inner.columns.first)),
            Region(within, Span(self.inner.columns.end, columns.end)),
        )
        return tuple(region for region in found if region.area)


def interior_of(
    laid: GroupLayout, tile: int, splitting: Splitting, beside: Container[int] = ()
) -> Interior | None:
    """What `tile` computes before its halos are there; None = it waits for them first.

    Args:
        beside: tiles on the same device, whose parts of a halo are there at once.
    """
    network, number = laid.grid.network, _first_used(laid)
    if number is None or not (splitting.groups is None or laid.group.first in splitting.groups):
        return None
    operation = network.operations[number]
    read = operation.inputs[0]
    if not _is_alone(laid, operation) or _operations(laid, operation) < splitting.least_operations:
        return None
    if not any(sender not in beside for sender in laid.senders.get(tile, ())):
        return None
    source, owned = network.maps[read], laid.grid.owned(tile, read)
    outputs = laid.required(tile, operation.output)
    inner = Region(
        _inner(operation.rows, outputs.rows, owned.rows, source.height),
        _inner(operation.columns, outputs.columns, owned.columns, source.width),
    )
    own = Region(
        operation.rows.needed(outputs.rows, source.height),
        operation.columns.needed(outputs.columns, source.width),
    ).intersection(owned)
    if not (own.area and inner.area) or inner.area < splitting.least_part * outputs.area:
        return None
    return Interior(number, read, own, outputs, inner)


def _first_used(laid: GroupLayout) -> int | None:
    network, group = laid.grid.network, laid.group
    numbers = range(network.units[group.first].first, network.units[group.end - 1].end)
    return next((k for k in numbers if laid.is_used(network.operations[k].output)), None)


def _is_alone(laid: GroupLayout, operation: Operation) -> bool:
    """Whether it reads one map, of which others have parts, and needs no statistics."""
    (read, *others), entering = operation.inputs, laid.grid.network.entering
    return not operation.statistics and not others and read not in entering


def _operations(laid: GroupLayout, operation: Operation) -> float:
    """For each element that it makes."""
    return operation.flops / laid.grid.network.maps[operation.output].channels


def _inner(window: Window, outputs: Span, owned: Span, size: int) -> Span:
    """Those of `outputs` that read nothing of the map but `owned`."""
    first, end = outputs.first, outputs.end
    if owned.first > 0:
        first = max(first, -(-(owned.first + window.before) // window.stride))
    if owned.end < size:
        end = min(end, (owned.end + window.before - window.extent) // window.stride + 1)
    first = min(first, outputs.end)
    return Span(first, max(first, end))
