"""Model descriptions written by hand: capturing one takes half a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from p2ptrain.model.graph.description import (
    ModelDescription,
    TensorDescription,
    TensorKind,
    UnitDescription,
)
from p2ptrain.model.graph.nodes import Argument, Graph, GraphNode, InputRef, NodeRef, StateRef
from p2ptrain.model.graph.values import BATCH, Polynomial, ValueDescription

CHANNELS, HEIGHT, WIDTH = 4, 12, 10
IMAGE = InputRef(0)
WEIGHT = StateRef("conv.weight")
CONVOLUTION = ("aten.conv2d.default", WEIGHT, None, (1, 1), (1, 1))
"""What follows the map in its arguments."""

Step = tuple[object, ...]
"""Operator, then its arguments; a whole number stands for itself."""


def describe(
    steps: Sequence[tuple[str, tuple[Argument, ...]]],
    *,
    cuts: Sequence[int] = (),
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    shape: tuple[int, ...] = (CHANNELS, HEIGHT, WIDTH),
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> ModelDescription:
    """A model of the given (operator, arguments), whose last one is its loss.

    Args:
        steps: node by node.
        cuts: between units.
        tensors: of its state beside 4 x 4 filters of 3 x 3; buffers are those named "running..".
        shape, dtype: of its input.
        state_dtype: of its tensors.
    """
    shapes = {"conv.weight": (CHANNELS, CHANNELS, 3, 3), **(tensors or {})}
    nodes = tuple(
        GraphNode(f"node{k}", operator, arguments, (), True)
        for k, (operator, arguments) in enumerate(steps)
    )
    graph = Graph(nodes, (NodeRef(len(nodes) - 1),), {})
    borders = [0, *cuts, len(nodes)]
    ranges = [(borders[k], borders[k + 1]) for k in range(len(borders) - 1)]
    return ModelDescription(
        name="Model",
        inputs=(
            ValueDescription(
                "input_0",
                dtype,
                (BATCH, *(Polynomial((size,)) for size in shape)),
                False,
            ),
        ),
        targets=(),
        tensors=tuple(
            TensorDescription(
                name,
                TensorKind.BUFFER if name.startswith("running") else TensorKind.PARAMETER,
                state_dtype,
                size,
                torch.empty(size).stride(),
                not name.startswith("running"),
            )
            for name, size in shapes.items()
        ),
        tied={},
        state_dict=tuple(shapes),
        train=graph,
        evaluate=graph,
        units=tuple(
            UnitDescription(f"unit{k}", 1000, nodes, nodes) for k, nodes in enumerate(ranges)
        ),
    )


def convolution(source: Argument) -> tuple[str, tuple[Argument, ...]]:
    """3x3, same size."""
    return "aten.conv2d.default", (source, WEIGHT, None, (1, 1), (1, 1))
