"""Which operators can be tiled, what they read, and what of a model is tiled: windows, `TiledPart`.

`arguments_of` gives a node's arguments by the names of its operator's schema, with defaults.
Elementwise operators compute every position of a map from the same position of others. `NotTiled`
says why an operator cannot be tiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from p2ptrain.errors import PlanError
from p2ptrain.model.capture.aliases import declared_aliases
from p2ptrain.model.graph.description import Mode, ModelDescription
from p2ptrain.model.graph.effects import named_arguments
from p2ptrain.model.graph.nodes import Argument, GraphNode, NodeRef, Reference
from p2ptrain.model.graph.operators import resolve, words
from p2ptrain.model.graph.values import BATCH, ValueDescription
from p2ptrain.plan.types.feature_maps import AxisWindow, MapNetwork

CONVOLUTIONS = frozenset({"aten.conv2d.default", "aten.conv2d.padding"})

POOLINGS = frozenset({"aten.max_pool2d.default", "aten.avg_pool2d.default"})

PADDINGS = frozenset({"aten.pad.default", "aten.constant_pad_nd.default"})

Windows = tuple[AxisWindow, AxisWindow]
"""Of the rows and of the columns."""


def convolution_windows(arguments: Mapping[str, Any], kernel: tuple[int, int]) -> Windows:
    """Of a 2-dimensional convolution; `kernel` is its filters' height and width."""
    stride, dilation = pair(arguments, "stride"), pair(arguments, "dilation")
    if isinstance(arguments["padding"], str):
        return _named_padding(arguments["padding"], kernel, stride, dilation)
    padding = pair(arguments, "padding")
    rows, columns = (
        AxisWindow(kernel[i], stride[i], dilation[i], padding[i], padding[i]) for i in range(2)
    )
    return rows, columns


def _named_padding(
    name: str, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> Windows:
    """torch pads "same" unevenly where the extent is even: the odd position comes after."""
    found = []
    for i in range(2):
        added = dilation[i] * (kernel[i] - 1) if name == "same" else 0
        before = added // 2
        found.append(AxisWindow(kernel[i], stride[i], dilation[i], before, added - before))
    return found[0], found[1]


def pooling_windows(arguments: Mapping[str, Any]) -> Windows:
    """Of a maximum or average pooling."""
    kernel, padding = pair(arguments, "kernel_size"), pair(arguments, "padding")
    stride = pair(arguments, "stride") if arguments["stride"] else kernel
    dilation = pair(arguments, "dilation") if "dilation" in arguments else (1, 1)
    rows, columns = (
        AxisWindow(kernel[i], stride[i], dilation[i], padding[i], padding[i]) for i in range(2)
    )
    return rows, columns


def padding_windows(node: GraphNode, arguments: Mapping[str, Any]) -> Windows:
    """Of a padding with a constant around the map.

    Raises:
        NotTiled: it pads otherwise, or along other axes, or cuts positions off.
    """
    if arguments.get("mode", "constant") != "constant":
        raise NotTiled(f"it pads with {arguments['mode']} values, not with a constant")
    pads = tuple(arguments["pad"])
    if len(pads) not in (2, 4) or not all(type(p) is int and p >= 0 for p in pads):
        raise NotTiled(
            f"{elementwise_function(node.operator)} by {list(pads)} does not only add rows and "
            "columns"
        )
    left, right, top, bottom = (*pads, 0, 0)[:4]
    return AxisWindow(before=top, after=bottom), AxisWindow(before=left, after=right)


Pair = tuple[int, int]
"""(rows, columns)."""


def arguments_of(node: GraphNode) -> dict[str, Any]:
    """All arguments of a node that applies an ATen operator."""
    call = resolve(node.operator).call
    given: dict[str, Argument] = dict(named_arguments(node))
    if not isinstance(call, OpOverload):
        return dict(given)
    missing = (a for a in call._schema.arguments if a.name not in given)
    return {**given, **{a.name: a.default_value for a in missing if a.has_default_value()}}


def pair(arguments: Mapping[str, Any], name: str) -> Pair:
    """Two whole numbers; one stands for both.

    Raises:
        NotTiled: it is anything else.
    """
    value = arguments[name]
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if len(numbers) == 1:
        numbers = numbers * 2
    if len(numbers) != 2 or not all(type(number) is int for number in numbers):
        raise NotTiled(f"its {name} {value} is not one number an axis")
    return numbers[0], numbers[1]


UNARY = words(
    """
        abs neg negative exp expm1 log log1p log2 sqrt rsqrt square sin cos tanh atan erf
        sigmoid relu relu6 leaky_relu hardtanh hardsigmoid hardswish elu celu selu silu mish gelu
        softplus hardshrink softshrink threshold log_sigmoid clamp clamp_min clamp_max clip clone
        contiguous detach reciprocal pow nan_to_num prelu
    """
)
"""Of one map; other arguments are numbers, or one number a channel."""

BINARY = words(
    """
        add sub subtract rsub mul multiply div divide true_divide maximum minimum
    """
)
"""Of two maps of the same size, or of a map and numbers."""

IDENTITIES = words("dropout feature_dropout alias lift_fresh positive")
"""They give their argument itself (a dropout only where it is switched off)."""

CASTS = words("to type_as")
"""Of them those to the element type that the map has: its argument itself, or a copy."""

MAY_ALIAS = words("contiguous detach to")
"""Their result may be the argument, so neither may be written to afterwards."""


def elementwise_function(operator: str) -> str:
    """`relu` for "aten.relu_.default"."""
    return operator.split(".")[1].rstrip("_")


def is_in_place(operator: str) -> bool:
    """Whether it writes to its first argument."""
    return operator.split(".")[1].endswith("_")


def out_of_place(operator: str) -> str:
    """The form that leaves its arguments alone: "aten.relu.default"."""
    family, function, overload = operator.split(".")
    return f"{family}.{function.rstrip('_')}.{overload}"


class NotTiled(PlanError):
    """A node ends the tiled part; the message says what it does that no tile can do alone."""


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
