"""A unit as one window, as profile files say it: what an output position reads of the unit's map.

Windows one after the other are one window: with extents e, strides s and padding p,

    e = e1 + (e2 - 1) s1      s = s1 s2      p = p1 + p2 s1

and where paths join, the window that covers all of them. Normalisation is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2ptrain.plan.types.feature_maps import ELEMENTWISE, Axis, AxisWindow, MapNetwork


@dataclass(frozen=True, slots=True)
class UnitWindow:
    """One unit.

    Attributes:
        rows, columns: as many positions are padded before a map as behind it; no dilation.
        height, width: of the map that it reads.
    """

    rows: AxisWindow
    columns: AxisWindow
    height: int
    width: int


def unit_windows(network: MapNetwork) -> tuple[UnitWindow, ...]:
    """Of the first units, up to one that is no single window (it reads or gives several maps).

    None where several units read what enters: they are no chain.
    """
    found: list[UnitWindow] = []
    if network.least > 1:
        return ()
    for number in range(len(network.units)):
        window = _unit_window(network, number)
        if window is None:
            break
        found.append(window)
    return tuple(found)


def _unit_window(network: MapNetwork, number: int) -> UnitWindow | None:
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
    return UnitWindow(rows, columns, source.height, source.width)


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
