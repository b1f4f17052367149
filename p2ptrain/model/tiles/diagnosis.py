"""In which units a tile's values stopped being finite, as far as the maps that it keeps tell."""

from __future__ import annotations

from collections.abc import Mapping

from p2ptrain.tiles.network import MapNetwork


def broken_units(network: MapNetwork, finite: Mapping[int, bool]) -> range | None:
    """The units between what is finite and the first map that is not.

    Args:
        network: the tiled part, units where they are (without early borders).
        finite: by number of a map that is known: whether it is finite.

    Returns:
        None where all that is known is finite; an empty range where what enters is not.
    """
    broken = next((number for number in sorted(finite) if not finite[number]), None)
    if broken is None:
        return None
    if any(not finite.get(number, True) for number in network.entering):
        return range(0)
    inputs = {operation.output: operation.inputs for operation in network.operations}
    units, seen, waiting = set[int](), set[int](), [broken]
    while waiting:
        number = waiting.pop()
        unit = network.unit_of_map[number]
        if unit is None or number in seen:
            continue
        seen.add(number)
        units.add(unit)
        waiting += [read for read in inputs[number] if not finite.get(read, False)]
    return range(min(units), max(units) + 1)
