"""How a profile's units can be cut: from the model's own maps, or a file's `spatial` entries.

A file gives for each unit one window and the size of a map. `unit_windows` writes it: windows one
after the other are one window, of extent e, stride s and padding p,

    e = e1 + (e2 - 1) s1      s = s1 s2      p = p1 + p2 s1

and where paths join, the window that covers all of them. Branches and normalisation are not in it,
so what is planned from files alone is a chain whose statistics cost nothing. Of which map, the one
that the unit reads (as `p2ptrain profile` writes it) or the one that it makes, the format does not
say. Chosen is what fits more units in a row, then the bytes that more of them give; else the first.

`copied_bytes` is the memory of maps that tiles hold twice until the backward: the own part, as what
the group before gave, and the whole with its halo, as what the group behind has read (the whole
only, where that group begins with a normalisation). It is no sum of the groups' shares, so it is
added to a plan's needs afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from p2ptrain.plan.types.allocation import TileShape, owners
from p2ptrain.plan.types.feature_maps import (
    ELEMENTWISE,
    Axis,
    AxisWindow,
    FeatureMap,
    MapNetwork,
    MapUnit,
    Operation,
)
from p2ptrain.plan.types.profile import Pair, Profile, Spatial, Unit
from p2ptrain.tiling.grid import GroupLayout, TileGrid, first_normalised

ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class _ChainUnit:
    """A unit of the chain.

    Attributes:
        read, made: (height, width) of its maps.
    """

    unit: Unit
    spatial: Spatial
    read: Pair
    made: Pair


def tiled_network(profile: Profile) -> MapNetwork | None:
    """The maps of the first units that can be tiled; None where none can."""
    return profile.maps or _chain(profile)


def _chain(profile: Profile) -> MapNetwork | None:
    links = max((_as_read(profile), _as_made(profile)), key=_fitting)  # of equals the first
    if not links:
        return None
    first, channels = links[0].read, _channels(profile.input_bytes, links[0].read)
    image = FeatureMap("input", channels, *first, differentiable=False)
    made = [_made(number, link) for number, link in enumerate(links)]
    return MapNetwork(
        maps=(image, *(feature_map for feature_map, _ in made)),
        operations=tuple(operation for _, operation in made),
        units=tuple(_map_unit(link.unit, number) for number, link in enumerate(links)),
        entering=(0,),
        leaving=(len(links),),
        itemsize=ITEMSIZE,
    )


def _map_unit(unit: Unit, number: int) -> MapUnit:
    frozen_bytes = unit.parameter_bytes - unit.trained_bytes
    return MapUnit(unit.name, number, number + 1, unit.parameter_bytes, frozen_bytes)


def _fitting(links: list[_ChainUnit]) -> tuple[int, int]:
    """How many units, and how many of them give whole channels of their maps."""
    return len(links), sum(
        link.unit.output_bytes % (ITEMSIZE * link.made[0] * link.made[1]) == 0 for link in links
    )


def _as_read(profile: Profile) -> list[_ChainUnit]:
    """The longest chain, where sizes are of the maps that units read."""
    links: list[_ChainUnit] = []
    for unit, spatial in _spatial_units(profile):
        read = spatial.height, spatial.width
        made = _outputs(spatial, read)
        if min(made) < 1 or (links and links[-1].made != read):
            break
        links.append(_ChainUnit(unit, spatial, read, made))
    return links


def _as_made(profile: Profile) -> list[_ChainUnit]:
    """The longest chain, where sizes are of the maps that units make."""
    links: list[_ChainUnit] = []
    for unit, spatial in _spatial_units(profile):
        made = spatial.height, spatial.width
        read = links[-1].made if links else _image_of(profile, spatial)
        if read is None or _outputs(spatial, read) != made:
            break
        links.append(_ChainUnit(unit, spatial, read, made))
    return links


def _spatial_units(profile: Profile) -> Iterator[tuple[Unit, Spatial]]:
    for unit in profile.units:
        if unit.spatial is None:
            return
        yield unit, unit.spatial


def _image_of(profile: Profile, spatial: Spatial) -> Pair | None:
    """An image of which the first unit makes such a map; None where there is none.

    Several have as many windows: the one whose channels are whole, then the stride's multiple.
    """

    def unlikely(size: Pair) -> tuple[bool, bool, Pair]:
        height, width = size
        whole = profile.input_bytes % (ITEMSIZE * height * width) == 0
        multiple = spatial.height * spatial.stride[0], spatial.width * spatial.stride[1]
        return not whole, size != multiple, size

    axes = _read_by(spatial, 0, spatial.height), _read_by(spatial, 1, spatial.width)
    return min(product(*axes), key=unlikely, default=None)


def _read_by(spatial: Spatial, axis: int, made: int) -> range:
    """Sizes of which so many positions are made."""
    window = _window(spatial, axis)
    least = (made - 1) * window.stride + window.extent - window.before - window.after
    return range(max(least, 1), least + window.stride)


def _outputs(spatial: Spatial, read: Pair) -> Pair:
    return _window(spatial, 0).outputs(read[0]), _window(spatial, 1).outputs(read[1])


def _made(number: int, link: _ChainUnit) -> tuple[FeatureMap, Operation]:
    """The map that a unit makes and how."""
    unit, size = link.unit, link.made
    rows, columns = _window(link.spatial, 0), _window(link.spatial, 1)
    made = FeatureMap(unit.name, _channels(unit.output_bytes, size), *size)
    flops = unit.flops / (size[0] * size[1])
    return made, Operation(unit.name, (number,), number + 1, rows, columns, flops=flops)


def _window(spatial: Spatial, axis: int) -> AxisWindow:
    return AxisWindow(
        kernel=spatial.kernel[axis],
        stride=spatial.stride[axis],
        dilation=spatial.dilation[axis],
        before=spatial.padding[axis],
        after=spatial.padding[axis],
    )


def _channels(size_bytes: int, size: Pair) -> int:
    return max(1, size_bytes // (ITEMSIZE * size[0] * size[1]))


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


def unit_windows(network: MapNetwork) -> tuple[Spatial, ...]:
    """Of the first units, up to one that is no single window (it reads or gives several maps).

    None where several units read what enters: they are no chain.
    """
    found: list[Spatial] = []
    if network.least > 1:
        return ()
    for number in range(len(network.units)):
        window = _unit_window(network, number)
        if window is None:
            break
        found.append(window)
    return tuple(found)


def with_windows(profile: Profile, network: MapNetwork) -> Profile:
    """The profile for a file, whose first units say how they can be cut."""
    windows = unit_windows(network)
    cut = tuple(
        replace(unit, spatial=window) for unit, window in zip(profile.units, windows, strict=False)
    )
    return replace(profile, units=(*cut, *profile.units[len(cut) :]))


def _unit_window(network: MapNetwork, number: int) -> Spatial | None:
    operations = network.operations_of(number, number + 1)
    made = {operation.output for operation in operations}
    read = {n for operation in operations for n in operation.inputs} - made
    last = network.last_unit_of_map
    given = [n for n in made if last[n] > number]
    if len(read) != 1 or len(given) != 1:
        return None
    source, result = network.maps[read.pop()], network.maps[given[0]]
    windows = _paths(network, number, "rows"), _paths(network, number, "columns")
    rows, columns = (by_map.get(given[0]) for by_map in windows)
    if rows is None or columns is None:
        return None
    made_size = rows.outputs(source.height), columns.outputs(source.width)
    if made_size != (result.height, result.width):
        return None
    return Spatial(
        kernel=(rows.kernel, columns.kernel),
        stride=(rows.stride, columns.stride),
        padding=(rows.before, columns.before),
        dilation=(1, 1),
        height=source.height,
        width=source.width,
    )


def _paths(network: MapNetwork, number: int, axis: Axis) -> Mapping[int, AxisWindow]:
    """By map made in the unit: the window from what enters it, where there is one."""
    windows: dict[int, AxisWindow] = {}
    made = {operation.output for operation in network.operations_of(number, number + 1)}
    for operation in network.operations_of(number, number + 1):
        before = [windows.get(n) if n in made else ELEMENTWISE for n in operation.inputs]
        steps = [
            None if window is None else _after(window, operation.window(axis)) for window in before
        ]
        joined = _joined([step for step in steps if step is not None])
        if joined is not None and None not in steps:
            windows[operation.output] = joined
    return windows


def _after(one: AxisWindow, other: AxisWindow) -> AxisWindow:
    """First `one`, then `other`."""
    return AxisWindow(
        kernel=one.extent + (other.extent - 1) * one.stride,
        stride=one.stride * other.stride,
        before=one.before + other.before * one.stride,
        after=one.before + other.before * one.stride,
    )


def _joined(windows: list[AxisWindow]) -> AxisWindow | None:
    """What covers them; None where their strides differ."""
    if not windows or len({window.stride for window in windows}) != 1:
        return None
    before = max(window.before for window in windows)
    behind = max(window.extent - window.before for window in windows)
    return AxisWindow(kernel=before + behind, stride=windows[0].stride, before=before, after=before)
