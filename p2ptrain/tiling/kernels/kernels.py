"""One operator on one tile, ready to run again and again; and regions of maps as tensors.

A tile's input holds exactly what its outputs read of the map; where they read beyond the map's own
border, padding is put around it. torch's operators pad both ends of an axis alike, so a tile that
touches one border only is padded by hand. A convolution keeps the padded map for its backward, and
a rectifier before it keeps what it has given, so the map would exist twice:

    x --[relu]-- y --[zeros around it]-- copy of y --[convolution]      kept: y, copy of y
    x --[zeros around it]-- copy of x --[relu]-- y --[convolution]      kept: y

So zeros go around the map before it is made, where the operator leaves zeros zeros: the map's own
positions are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from p2ptrain.model.graph.nodes import Argument, GraphNode, InputRef, NodeRef, Reference, StateRef
from p2ptrain.model.graph.operators import resolve
from p2ptrain.plan.types.feature_maps import AxisSpan, FeatureMap, MapNetwork, Operation, Region
from p2ptrain.tiling.kernels.tile_steps import TileSegment
from p2ptrain.tiling.kernels.tileable_operators import (
    CONVOLUTIONS,
    PADDINGS,
    UNARY,
    arguments_of,
    elementwise_function,
    is_in_place,
    out_of_place,
    pair,
)

Kernel = Callable[[Sequence[Tensor]], Tensor]
"""Tensors of the operation's inputs, cut to what is read -> its output on the tile."""

Padding = tuple[tuple[int, int], tuple[int, int]]
"""(before, after) of the rows and of the columns."""

_ops = torch.ops.aten


@dataclass(frozen=True, slots=True)
class TilePlace:
    """Where an operation runs.

    Attributes:
        node: what it applies.
        operation: the same as plain data.
        reads: which of `operation.inputs` each value that the node reads is.
        source: the map it reads (of several, the first).
        outputs: what it makes of its output map.
        in_place: it may write to its first input.
    """

    node: GraphNode
    operation: Operation
    reads: Mapping[Reference, int]
    source: FeatureMap
    outputs: Region
    in_place: bool

    @property
    def padding(self) -> Padding:
        """What must be put around its input."""
        return (
            self.operation.rows.padding(self.outputs.rows, self.source.height),
            self.operation.columns.padding(self.outputs.columns, self.source.width),
        )


def kernel(place: TilePlace, state: Mapping[str, Tensor]) -> Kernel:
    """The operator of `place` with the tensors of `state`."""
    operator = place.node.operator
    if operator in CONVOLUTIONS:
        return convolution(place, state, place.padding)
    if operator == "aten.max_pool2d.default":
        return _maximum_pooling(place)
    if operator == "aten.avg_pool2d.default":
        return _average_pooling(place)
    if operator in PADDINGS:
        value = arguments_of(place.node).get("value") or 0.0
        return lambda inputs: _padded(inputs[0], place.padding, value)
    return _elementwise(place, state)


def convolution(place: TilePlace, state: Mapping[str, Tensor], padding: Padding) -> Kernel:
    """The convolution of `place`, of an input that lacks `padding` of what its outputs read."""
    arguments = arguments_of(place.node)
    weight = state[arguments["weight"].name]
    bias = None if arguments["bias"] is None else state[arguments["bias"].name]
    stride, dilation = pair(arguments, "stride"), pair(arguments, "dilation")
    by_hand, both_ends = _divided(padding)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        padded = _padded(inputs[0], by_hand, 0.0)
        made: Tensor = _ops.conv2d.default(
            padded, weight, bias, stride, both_ends, dilation, arguments["groups"]
        )
        return made

    return run


def padded_by_hand(padding: Padding) -> Padding:
    """What of it the convolution's operator cannot put around its input itself."""
    return _divided(padding)[0]


def padding_first(call: Kernel, padding: Padding) -> Kernel:
    """`call` on its input with zeros around it."""
    return lambda inputs: call([_padded(inputs[0], padding, 0.0)])


def _maximum_pooling(place: TilePlace) -> Kernel:
    rows, columns = place.operation.rows, place.operation.columns
    kernel_size, stride = (rows.kernel, columns.kernel), (rows.stride, columns.stride)
    dilation = rows.dilation, columns.dilation
    by_hand, both_ends = _divided(place.padding)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        padded = _padded(inputs[0], by_hand, -torch.inf)
        made: Tensor = _ops.max_pool2d.default(padded, kernel_size, stride, both_ends, dilation)
        return made

    return run


def _average_pooling(place: TilePlace) -> Kernel:
    """Sums by torch, divided by what each window counts: at borders that is less than its size."""
    rows, columns = place.operation.rows, place.operation.columns
    kernel_size, stride = [rows.kernel, columns.kernel], [rows.stride, columns.stride]
    padding, counts = place.padding, _counts(place)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        padded = _padded(inputs[0], padding, 0.0)
        if isinstance(counts, int):
            pooled: Tensor = _ops.avg_pool2d.default(
                padded, kernel_size, stride, [0, 0], False, True, counts
            )
            return pooled
        sums: Tensor = _ops.avg_pool2d.default(padded, kernel_size, stride, [0, 0], False, True, 1)
        return sums / counts.to(sums.dtype)

    return run


def _counts(place: TilePlace) -> int | Tensor:
    """What the sum under each window is divided by; one number where it is the same everywhere."""
    arguments = arguments_of(place.node)
    if arguments["divisor_override"] is not None:
        divisor: int = arguments["divisor_override"]
        return divisor
    sizes = place.source.height, place.source.width
    spans = place.outputs.rows, place.outputs.columns
    taps = []
    for window, span, size in zip(
        (place.operation.rows, place.operation.columns), spans, sizes, strict=True
    ):
        counted = AxisSpan(0, size)
        if arguments["count_include_pad"]:
            counted = AxisSpan(-window.before, size + window.after)
        taps.append(torch.tensor(window.taps(span, counted)))
    counts = taps[0][:, None] * taps[1][None, :]
    first = int(counts[0, 0])
    return first if bool((counts == first).all()) else counts


def _elementwise(place: TilePlace, state: Mapping[str, Tensor]) -> Kernel:
    node, inputs = place.node, place.operation.inputs
    operator = node.operator
    if is_in_place(operator) and not place.in_place:
        operator = out_of_place(operator)
    call = resolve(operator).call
    position = {reference: inputs.index(number) for reference, number in place.reads.items()}

    def fill(argument: Argument, tensors: Sequence[Tensor]) -> Any:
        if isinstance(argument, InputRef | NodeRef):
            return tensors[position[argument]]
        if isinstance(argument, StateRef):
            return state[argument.name]
        if isinstance(argument, tuple):
            return [fill(item, tensors) for item in argument]
        return argument

    def run(tensors: Sequence[Tensor]) -> Tensor:
        args = [fill(argument, tensors) for argument in node.args]
        kwargs = {name: fill(argument, tensors) for name, argument in node.kwargs}
        made: Tensor = call(*args, **kwargs)
        return made

    return run


def _divided(padding: Padding) -> tuple[Padding, list[int]]:
    """(what to pad by hand, what the operator pads at both ends of each axis)."""
    by_hand: list[tuple[int, int]] = []
    both_ends: list[int] = []
    for before, after in padding:
        alike = before == after
        by_hand.append((0, 0) if alike else (before, after))
        both_ends.append(before if alike else 0)
    return (by_hand[0], by_hand[1]), both_ends


def _padded(tensor: Tensor, padding: Padding, value: float) -> Tensor:
    (top, bottom), (left, right) = padding
    if not (top or bottom or left or right):
        return tensor
    return functional.pad(tensor, (left, right, top, bottom), value=value)


def cut_region(tensor: Tensor, cuts: tuple[slice, slice] | None) -> Tensor:
    """A region of samples x channels x rows x columns."""
    return tensor if cuts is None else tensor[:, :, cuts[0], cuts[1]]


def region_view(tensor: Tensor, held: Region, wanted: Region) -> Tensor:
    """The `wanted` region of a tensor that holds `held`."""
    return tensor if wanted == held else cut_region(tensor, wanted.within(held))


def embed_region(tensor: Tensor, region: Region, whole: Region) -> Tensor:
    """A tensor of `whole` with `tensor` in its `region`, zeros around it."""
    if region == whole:
        return tensor
    shape = (*tensor.shape[:2], whole.rows.size, whole.columns.size)
    made = tensor.new_zeros(shape)
    cut_region(made, region.within(whole)).copy_(tensor)
    return made


def copied(tensor: Tensor, region: Region, whole: Region) -> Tensor:
    """As `embed_region`, in memory of its own."""
    if region == whole:
        return tensor.clone(memory_format=torch.contiguous_format)
    return embed_region(tensor, region, whole)


def add_to(gradients: dict[int, Tensor], number: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        known = gradients.get(number)
        gradients[number] = gradient if known is None else known + gradient


def maker_for(network: MapNetwork, segment: TileSegment, reader: int) -> int | None:
    """The operation that makes what `reader` reads, for it alone.

    None where another operation reads it too, or it was made before the segment.
    """
    number = network.operations[reader].inputs[0]
    readers = [k for k in segment.operations if number in network.operations[k].inputs]
    if readers != [reader] or number in segment.gives:
        return None
    return next((k for k in segment.operations if network.operations[k].output == number), None)


def leaves_zeros(operator: str, call: Kernel, source: FeatureMap, dtype: torch.dtype) -> bool:
    """Whether `call`, of the named operator, is of each position alone, and of zeros zeros."""
    if elementwise_function(operator) not in UNARY:
        return False
    with torch.no_grad():
        made = call([torch.zeros((1, source.channels, 1, 1), dtype=dtype)])
    return not bool(made.any())
