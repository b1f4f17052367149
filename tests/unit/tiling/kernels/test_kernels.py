"""Operators on a tile against the same operator on the whole map."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.model.graph.nodes import Argument, GraphNode, InputRef, StateRef
from p2ptrain.model.graph.operators import resolve
from p2ptrain.plan.types.feature_maps import AxisSpan, FeatureMap, Operation, Region
from p2ptrain.tiling.kernels.kernels import TilePlace, kernel
from p2ptrain.tiling.kernels.tileable_operators import (
    Windows,
    arguments_of,
    convolution_windows,
    padding_windows,
    pooling_windows,
)

CHANNELS, SIZE = 2, (11, 9)
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def node(operator: str, *arguments: Argument) -> GraphNode:
    return GraphNode("node", operator, (InputRef(0), *arguments), (), True)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[GraphNode, Windows, dict[str, Tensor]]:
    kernel_size = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    groups = draw(st.sampled_from((1, CHANNELS)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = 4, CHANNELS // groups, *kernel_size
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    dilation, stride = draw(PAIRS), draw(PAIRS)
    if draw(st.booleans()):
        operator, padding, stride = "aten.conv2d.padding", "same", (1, 1)
    else:
        operator = "aten.conv2d.default"
        padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    made = node(operator, StateRef("weight"), None, stride, padding, dilation, groups)
    windows = convolution_windows(arguments_of(made), kernel_size)
    return made, windows, {"weight": weight}


@st.composite
def poolings(draw: st.DrawFn) -> tuple[GraphNode, Windows, dict[str, Tensor]]:
    size = draw(PAIRS)
    padding = tuple(draw(st.integers(0, k // 2)) for k in size)
    stride, ceil_mode = draw(PAIRS), draw(st.booleans())
    if draw(st.booleans()):
        dilation = draw(PAIRS)
        made = node("aten.max_pool2d.default", size, stride, padding, dilation, ceil_mode)
    else:
        counted, divisor = draw(st.booleans()), draw(st.sampled_from((None, 5)))
        made = node("aten.avg_pool2d.default", size, stride, padding, ceil_mode, counted, divisor)
    return made, pooling_windows(arguments_of(made)), {}


@st.composite
def paddings(draw: st.DrawFn) -> tuple[GraphNode, Windows, dict[str, Tensor]]:
    sizes = tuple(draw(st.lists(st.integers(0, 4), min_size=4, max_size=4)))
    made = node("aten.pad.default", sizes, "constant", draw(st.sampled_from((None, 1.5))))
    return made, padding_windows(made, arguments_of(made)), {}


@settings(max_examples=60, deadline=None)
@given(convolutions() | poolings() | paddings(), st.data())
def test_any_tile_is_what_it_is_in_the_whole(
    case: tuple[GraphNode, Windows, dict[str, Tensor]], data: st.DataObject
) -> None:
    made, windows, state = case
    ceil_mode = bool(arguments_of(made).get("ceil_mode", False))
    sizes = [w.outputs(s, ceil_mode=ceil_mode) for w, s in zip(windows, SIZE, strict=True)]
    assume(min(sizes) >= 1)
    image = torch.randn(2, CHANNELS, *SIZE, dtype=torch.float64, requires_grad=True)
    whole = applied(made, image, state)
    assert list(whole.shape[2:]) == sizes
    spans = []
    for size in sizes:
        first = data.draw(st.integers(0, size - 1))
        spans.append(AxisSpan(first, data.draw(st.integers(first + 1, size))))
    outputs = Region(*spans)
    place = TilePlace(
        node=made,
        operation=Operation("node", (0,), 1, *windows),
        reads={InputRef(0): 0},
        source=FeatureMap("image", CHANNELS, *SIZE),
        outputs=outputs,
        in_place=False,
    )
    rows, columns = (
        window.needed(span, size) for window, span, size in zip(windows, spans, SIZE, strict=True)
    )
    read = image[:, :, rows.first : rows.end, columns.first : columns.end]
    tile = kernel(place, state)([read])
    row_cut, column_cut = outputs.within(Region(AxisSpan(0, sizes[0]), AxisSpan(0, sizes[1])))
    expected = whole[:, :, row_cut, column_cut]
    torch.testing.assert_close(tile, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(tile, image, seed)
    (theirs,) = torch.autograd.grad(expected, image, seed)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def applied(made: GraphNode, image: Tensor, state: dict[str, Tensor]) -> Tensor:
    """torch's own operator on the whole image."""

    def value(argument: Argument) -> Any:
        if isinstance(argument, InputRef):
            return image
        return state[argument.name] if isinstance(argument, StateRef) else argument

    result: Tensor = resolve(made.operator).call(*(value(argument) for argument in made.args))
    return result
