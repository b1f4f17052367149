"""The windows of convolutions and poolings, read from their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2ptrain.model.graph import Node
from p2ptrain.model.tiles.arguments import pair
from p2ptrain.model.tiles.elementwise import function_of
from p2ptrain.model.tiles.refusal import NotTiled
from p2ptrain.tiles.window import Window

CONVOLUTIONS = frozenset({"aten.conv2d.default", "aten.conv2d.padding"})
POOLINGS = frozenset({"aten.max_pool2d.default", "aten.avg_pool2d.default"})
PADDINGS = frozenset({"aten.pad.default", "aten.constant_pad_nd.default"})

Windows = tuple[Window, Window]
"""Of the rows and of the columns."""


def convolution_windows(arguments: Mapping[str, Any], kernel: tuple[int, int]) -> Windows:
    """Of a 2-dimensional convolution; `kernel` is its filters' height and width."""
    stride, dilation = pair(arguments, "stride"), pair(arguments, "dilation")
    if isinstance(arguments["padding"], str):
        return _named_padding(arguments["padding"], kernel, stride, dilation)
    padding = pair(arguments, "padding")
    rows, columns = (
        Window(kernel[i], stride[i], dilation[i], padding[i], padding[i]) for i in range(2)
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
        found.append(Window(kernel[i], stride[i], dilation[i], before, added - before))
    return found[0], found[1]


def pooling_windows(arguments: Mapping[str, Any]) -> Windows:
    """Of a maximum or average pooling."""
    kernel, padding = pair(arguments, "kernel_size"), pair(arguments, "padding")
    stride = pair(arguments, "stride") if arguments["stride"] else kernel
    dilation = pair(arguments, "dilation") if "dilation" in arguments else (1, 1)
    rows, columns = (
        Window(kernel[i], stride[i], dilation[i], padding[i], padding[i]) for i in range(2)
    )
    return rows, columns


def padding_windows(node: Node, arguments: Mapping[str, Any]) -> Windows:
    """Of a padding with a constant around the map.

    Raises:
        NotTiled: it pads otherwise, or along other axes, or cuts positions off.
    """
    if arguments.get("mode", "constant") != "constant":
        raise NotTiled(f"it pads with {arguments['mode']} values, not with a constant")
    pads = tuple(arguments["pad"])
    if len(pads) not in (2, 4) or not all(type(p) is int and p >= 0 for p in pads):
        raise NotTiled(
            f"{function_of(node.operator)} by {list(pads)} does not only add rows and columns"
        )
    left, right, top, bottom = (*pads, 0, 0)[:4]
    return Window(before=top, after=bottom), Window(before=left, after=right)
