"""How a profile's units can be cut: from the model's own maps, or a file's `spatial` entries.

A file says of each unit one window and the size of the map it reads; branches and normalisation are
not in it, so what is planned from files alone is a chain whose statistics cost nothing.
"""

from __future__ import annotations

from p2ptrain.plan.profile import Pair, Profile, Spatial, Unit
from p2ptrain.tiles.network import FeatureMap, MapNetwork, MapUnit, Operation
from p2ptrain.tiles.window import Window

ITEMSIZE = 4


def tiled_network(profile: Profile) -> MapNetwork | None:
    """The maps of the first units that can be tiled; None where none can."""
    return profile.maps or _chain(profile)


def _chain(profile: Profile) -> MapNetwork | None:
    maps: list[FeatureMap] = []
    operations: list[Operation] = []
    units: list[MapUnit] = []
    for number, unit in enumerate(profile.units):
        spatial = unit.spatial
        if spatial is None or (maps and _size(maps[-1]) != (spatial.height, spatial.width)):
            break
        made = _made(number, unit, spatial)
        if made is None:
            break
        if not maps:
            maps.append(_image(profile, spatial))
        maps.append(made[0])
        operations.append(made[1])
        units.append(MapUnit(unit.name, number, number + 1, unit.parameter_bytes))
    if not units:
        return None
    last = len(maps) - 1
    return MapNetwork(tuple(maps), tuple(operations), tuple(units), (0,), (last,), ITEMSIZE)


def _image(profile: Profile, spatial: Spatial) -> FeatureMap:
    channels = _channels(profile.input_bytes, (spatial.height, spatial.width))
    return FeatureMap("input", channels, spatial.height, spatial.width, differentiable=False)


def _made(number: int, unit: Unit, spatial: Spatial) -> tuple[FeatureMap, Operation] | None:
    """The map that a unit makes and how; None where its window does not fit."""
    rows, columns = _window(spatial, 0), _window(spatial, 1)
    size = rows.outputs(spatial.height), columns.outputs(spatial.width)
    if min(size) < 1:
        return None
    made = FeatureMap(unit.name, _channels(unit.output_bytes, size), *size)
    flops = unit.flops / (size[0] * size[1])
    return made, Operation(unit.name, (number,), number + 1, rows, columns, flops=flops)


def _window(spatial: Spatial, axis: int) -> Window:
    return Window(
        kernel=spatial.kernel[axis],
        stride=spatial.stride[axis],
        dilation=spatial.dilation[axis],
        before=spatial.padding[axis],
        after=spatial.padding[axis],
    )


def _channels(size_bytes: int, size: Pair) -> int:
    return max(1, size_bytes // (ITEMSIZE * size[0] * size[1]))


def _size(feature_map: FeatureMap) -> Pair:
    return feature_map.height, feature_map.width
