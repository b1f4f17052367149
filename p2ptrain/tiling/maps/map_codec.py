"""A network of maps as plain data, for coordinators that do not have the model."""

from __future__ import annotations

from typing import Any

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.feature_maps import AxisWindow, FeatureMap, MapNetwork, MapUnit, Operation

MAX_MAPS = 20_000

_WRONG = "a network of maps has maps, operations between them and units"


def network_fields(network: MapNetwork) -> dict[str, Any]:
    """For CBOR."""
    return {
        "maps": [[m.name, m.channels, m.height, m.width, m.differentiable] for m in network.maps],
        "operations": [
            [
                o.name,
                list(o.inputs),
                o.output,
                _window_fields(o.rows),
                _window_fields(o.columns),
                o.statistics,
                float(o.flops),
            ]
            for o in network.operations
        ],
        "units": [[u.name, u.first, u.end, u.parameter_bytes] for u in network.units],
        "entering": list(network.entering),
        "leaving": list(network.leaving),
        "itemsize": network.itemsize,
        "least": network.least,
    }


def read_network(value: object) -> MapNetwork:
    """Check and read `network_fields`. Raises OptionError."""
    match value:
        case {
            "maps": [*maps],
            "operations": [*operations],
            "units": [_, *_] as units,
            "entering": [*entering],
            "leaving": [*leaving],
            "itemsize": int(itemsize),
            "least": int(least),
        } if (
            0 < itemsize <= 16
            and 0 < least <= len(units)
            and len(maps) <= MAX_MAPS
            and len(operations) <= MAX_MAPS
        ):
            network = MapNetwork(
                maps=tuple(_map(entry) for entry in maps),
                operations=tuple(_operation(entry) for entry in operations),
                units=tuple(_unit(entry) for entry in units),
                entering=tuple(entering),
                leaving=tuple(leaving),
                itemsize=itemsize,
                least=least,
            )
            _check(network)
            return network
    raise OptionError(_WRONG)


def _check(network: MapNetwork) -> None:
    """Operations read what is there before them, make maps in order, and units divide them."""
    made = [operation.output for operation in network.operations]
    known = set(network.entering)
    if not all(type(n) is int for n in (*network.entering, *network.leaving)):
        raise OptionError(_WRONG)
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


def _map(entry: object) -> FeatureMap:
    match entry:
        case [str(name), int(channels), int(height), int(width), bool(differentiable)] if (
            min(channels, height, width) >= 1
        ):
            return FeatureMap(name, channels, height, width, differentiable)
    raise OptionError(_WRONG)


def _operation(entry: object) -> Operation:
    match entry:
        case [
            str(name),
            [_, *_] as inputs,
            int(output),
            rows,
            columns,
            bool(sums),
            float(flops),
        ] if flops >= 0 and inputs and all(type(number) is int for number in inputs):
            windows = _window(rows), _window(columns)
            numbers = tuple(number for number in inputs if isinstance(number, int))
            return Operation(name, numbers, output, *windows, sums, flops)
    raise OptionError(_WRONG)


def _unit(entry: object) -> MapUnit:
    match entry:
        case [str(name), int(first), int(end), int(parameter_bytes)] if parameter_bytes >= 0:
            return MapUnit(name, first, end, parameter_bytes)
    raise OptionError(_WRONG)


def _window_fields(window: AxisWindow) -> list[int]:
    return [window.kernel, window.stride, window.dilation, window.before, window.after]


def _window(value: object) -> AxisWindow:
    match value:
        case [int(kernel), int(stride), int(dilation), int(before), int(after)] if (
            min(kernel, stride, dilation) >= 1 and min(before, after) >= 0
        ):
            return AxisWindow(kernel, stride, dilation, before, after)
    raise OptionError(_WRONG)
