"""A cut between the units where tiling ends, so that ordinary stages can follow.

Units are cut where little crosses, which is behind a global pooling rather than before it: the last
convolution stands in one unit with what no tile can do. Its tiled part becomes a unit of its own.
"""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.model.graph.description import Mode, ModelDescription, UnitDescription
from p2ptrain.model.graph.nodes import Graph
from p2ptrain.model.graph.values import BATCH, Polynomial, ValueDescription
from p2ptrain.plan.types.feature_maps import FeatureMap
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.tileable_operators import NotTiled, TiledPart


def cut_where_tiling_ends(description: ModelDescription) -> tuple[ModelDescription, TiledPart]:
    """The model with a border of units where its tiled part ends, and that part.

    Where the evaluation graph cannot be cut at the same place, tiling ends a few nodes earlier, at
    the border that is there.

    Raises:
        NotTiled: nothing of the model can be tiled.
    """
    part = read_tiled_part(description)
    if part.whole == len(part.network.units):
        return description, part
    other = _evaluated(description, part)
    if other is None:
        return description, read_tiled_part(description, whole_units=True)
    cut = _cut(description, part, other)
    return cut, replace(read_tiled_part(cut), reason=part.reason)


def _evaluated(description: ModelDescription, part: TiledPart) -> TiledPart | None:
    """The same part of the evaluation graph; None where that cannot be cut there."""
    if description.evaluate == description.train:
        return part
    try:
        other = read_tiled_part(description, "eval")
    except NotTiled:
        return None
    alike = (
        len(other.network.units) == len(part.network.units)
        and other.whole == part.whole
        and _leaving(other) == _leaving(part)
    )
    return other if alike else None


def _leaving(part: TiledPart) -> list[tuple[int, int, int]]:
    maps = (part.network.maps[number] for _, number in part.leaving)
    return [(m.channels, m.height, m.width) for m in maps]


def _cut(description: ModelDescription, part: TiledPart, other: TiledPart) -> ModelDescription:
    place = part.whole
    unit = description.units[place]
    tiled = part.network.units[place]
    flops = 0.0
    for operation in part.network.operations[tiled.first : tiled.end]:
        made = part.network.maps[operation.output]
        flops += operation.flops * made.height * made.width
    work = min(round(flops), unit.flops)
    taken = {other.name for other in description.units}
    name = next(n for k in range(2, 2 + len(taken)) if (n := f"{unit.name}#{k}") not in taken)
    halves = (
        UnitDescription(
            unit.name,
            work,
            (unit.train[0], part.stop),
            (unit.evaluate[0], other.stop),
        ),
        UnitDescription(
            name,
            unit.flops - work,
            (part.stop, unit.train[1]),
            (other.stop, unit.evaluate[1]),
        ),
    )
    train = evaluate = _with_crossings(description, "train", part)
    if other is not part:
        evaluate = _with_crossings(description, "eval", other)
    return replace(
        description,
        train=train,
        evaluate=evaluate,
        units=(*description.units[:place], *halves, *description.units[place + 1 :]),
    )


def _with_crossings(description: ModelDescription, mode: Mode, part: TiledPart) -> Graph:
    graph = description.graph(mode)
    known = dict(graph.crossing_values)
    for value, number in part.leaving:
        feature_map = part.network.maps[number]
        name = graph.nodes[value.index].name
        described = _describe(description, part, name, feature_map, mode)
        known.setdefault(value.index, described)
    return replace(graph, crossing_values=dict(sorted(known.items())))


def _describe(
    description: ModelDescription, part: TiledPart, name: str, feature_map: FeatureMap, mode: Mode
) -> ValueDescription:
    sizes = feature_map.channels, feature_map.height, feature_map.width
    return ValueDescription(
        name,
        description.inputs[part.entering[0]].dtype,
        (BATCH, *(Polynomial((size,)) for size in sizes)),
        feature_map.differentiable and mode == "train",
    )
