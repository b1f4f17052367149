"""What of a model is tiled, and where that may end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.model.capture.aliases import declared_aliases
from p2ptrain.model.graph.description import Mode, ModelDescription
from p2ptrain.model.graph.nodes import NodeRef, Reference
from p2ptrain.model.graph.values import BATCH, ValueDescription
from p2ptrain.plan.types.feature_maps import MapNetwork


@dataclass(frozen=True, slots=True)
class TiledPart:
    """What of a model can be tiled.

    Attributes:
        mode: the graph that it is of.
        network: its maps and operators; a unit that can be tiled in part is its last one.
        nodes: by operation: the index of its node.
        reads: by operation: which map each value that its node reads stands for at that place.
        counters: by unit: nodes that count up a buffer; no map goes through them.
        entering: by the network's entering maps: the leaf of the model's input.
        leaving: values that nodes behind the tiled part read, ascending, and the map each stands
            for; an in-place operator and its argument stand for one.
        stop: nodes [0, stop) are tiled.
        whole: units [0, whole) are tiled as a whole.
        reason: what ends the tiled part, with the unit's and the node's name; None where all is.
    """

    mode: Mode
    network: MapNetwork
    nodes: tuple[int, ...]
    reads: tuple[Mapping[Reference, int], ...]
    counters: tuple[tuple[int, ...], ...]
    entering: tuple[int, ...]
    leaving: tuple[tuple[NodeRef, int], ...]
    stop: int
    whole: int
    reason: str | None


def last_cut(description: ModelDescription, mode: Mode, stop: int, *, whole_units: bool) -> int:
    """The last position up to `stop` where the tiled part may end.

    Inside of a unit it may where units could have been cut too (`aliases`).
    """
    unit = next((u for u in description.units if stop < u.nodes(mode)[1]), None)
    if unit is None:
        return stop
    first = unit.nodes(mode)[0]
    if whole_units:
        return first
    uncut = [*declared_aliases(description.graph(mode).nodes).uncut_ranges()]
    return next(
        position
        for position in range(stop, first - 1, -1)
        if position == first or not any(a < position <= b for a, b in uncut)
    )


def map_shape(value: ValueDescription) -> tuple[int, int, int] | None:
    """(channels, height, width) of a batch of images; None where it is none."""
    dimensions = value.dimensions
    if len(dimensions) != 4 or dimensions[0] != BATCH:
        return None
    if not all(d.is_constant and d.coefficients[0] > 0 for d in dimensions[1:]):
        return None
    channels, height, width = (d.coefficients[0] for d in dimensions[1:])
    return channels, height, width
