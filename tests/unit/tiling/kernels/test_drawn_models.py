"""Models drawn at random, in tiles, against their nodes run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import Argument, GraphNode, InputRef, NodeRef, StateRef
from p2ptrain.model.graph.operators import resolve
from p2ptrain.tiling.grid import GridError, GridLayout
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.tileable_operators import TiledPart
from tests.support.tiled_descriptions import describe
from tests.support.tiling_in_process import Tiles

CHANNELS, SIZES = 3, (17, 14)
LEAST = 5
"""Positions along an axis that a map must keep."""
"""What needs no halo is computed first, however little it is."""


@dataclass
class Drawing:
    """A model as it grows; `shapes` are (channels, rows, columns) by node."""

    steps: list[tuple[str, tuple[Argument, ...]]] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # nodes whose value an in-place one has changed

    def add(
        self, operator: str, arguments: tuple[Argument, ...], shape: tuple[int, int, int]
    ) -> None:
        self.steps.append((operator, arguments))
        self.shapes.append(shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> StateRef:
        full = f"{name}{len(self.tensors)}"
        self.tensors[full] = shape
        return StateRef(full)


def add_convolution(draw: st.DrawFn, model: Drawing) -> None:
    source: Argument = NodeRef(len(model.steps) - 1) if model.steps else InputRef(0)
    channels, *sides = model.shapes[-1] if model.shapes else (CHANNELS, *SIZES)
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    stride = draw(st.sampled_from(((1, 1), (1, 1), (2, 1), (2, 2))))
    padding = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    dilation = draw(st.sampled_from(((1, 1), (2, 1))))
    made = [
        (side + 2 * p - d * (k - 1) - 1) // s + 1
        for side, p, d, k, s in zip(sides, padding, dilation, kernel, stride, strict=True)
    ]
    if min(made) < LEAST:
        return
    groups = channels if channels == CHANNELS and draw(st.booleans()) else 1
    weight = model.tensor("filters", (CHANNELS, channels // groups, *kernel))
    bias = model.tensor("bias", (CHANNELS,)) if draw(st.booleans()) else None
    arguments = (source, weight, bias, stride, padding, dilation, groups)
    model.add("aten.conv2d.default", arguments, (CHANNELS, made[0], made[1]))


def add_pooling(draw: st.DrawFn, model: Drawing) -> None:
    channels, *sides = model.shapes[-1]
    size, stride = draw(st.sampled_from(((2, 2), (3, 2), (3, 1))))
    padding, ceil_mode = draw(st.integers(0, size // 2)), draw(st.booleans())
    made = []
    for side in sides:
        free = side + 2 * padding - size
        count = (-(-free // stride) if ceil_mode else free // stride) + 1
        made.append(count - (ceil_mode and (count - 1) * stride >= side + padding))
    if min(made) < LEAST:
        return
    shape, source = (channels, made[0], made[1]), NodeRef(len(model.steps) - 1)
    pads = (padding, padding)
    if draw(st.booleans()):
        arguments = (source, (size, size), (stride, stride), pads, (1, 1), ceil_mode)
        model.add("aten.max_pool2d.default", arguments, shape)
    else:
        counted = draw(st.booleans())
        arguments = (source, (size, size), (stride, stride), pads, ceil_mode, counted)
        model.add("aten.avg_pool2d.default", arguments, shape)


def add_normalisation(draw: st.DrawFn, model: Drawing) -> None:
    shape, affine = model.shapes[-1], draw(st.booleans())
    weight, bias = (model.tensor(name, shape[:1]) if affine else None for name in ("w", "b"))
    running = model.tensor("running", shape[:1]), model.tensor("running", shape[:1])
    source = NodeRef(len(model.steps) - 1)
    model.add(
        "aten.batch_norm.default",
        (source, weight, bias, *running, True, 0.1, 1e-5, False),
        shape,
    )


def add_elementwise(draw: st.DrawFn, model: Drawing) -> None:
    place, shape = len(model.steps) - 1, model.shapes[-1]
    same = [
        k for k, other in enumerate(model.shapes) if other[1:] == shape[1:] and k not in model.gone
    ]
    kind = draw(st.sampled_from(("tanh", "relu_", "add", "mul", "add_", "cat")))
    other = draw(st.sampled_from(same))
    if kind == "tanh":
        model.add("aten.tanh.default", (NodeRef(place),), shape)
    elif kind == "relu_":
        model.add("aten.relu_.default", (NodeRef(place),), shape)
        model.gone.add(place)
    elif kind == "cat":
        channels = shape[0] + model.shapes[other][0]
        parts = (NodeRef(place), NodeRef(other))
        model.add("aten.cat.default", (parts, 1), (channels, *shape[1:]))
    elif model.shapes[other] == shape and (kind != "add_" or other != place):
        model.add(f"aten.{kind}.Tensor", (NodeRef(place), NodeRef(other)), shape)
        if kind == "add_":
            model.gone.add(place)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[ModelDescription, TiledPart, GridLayout]:
    model = Drawing()
    add_convolution(draw, model)
    assume(model.steps)
    kinds = (add_convolution, add_convolution, add_pooling, add_normalisation, add_elementwise)
    for _ in range(draw(st.integers(1, 7))):
        draw(st.sampled_from(kinds))(draw, model)
    count = len(model.steps)
    readers = [NodeRef(count - 1)]
    others = [k for k in range(count - 1) if k not in model.gone]
    if others and draw(st.booleans()):
        readers.append(NodeRef(draw(st.sampled_from(others))))
    for reader in readers:
        model.add("aten.mean.default", (reader,), (0, 0, 0))
    cuts = sorted(draw(st.sets(st.integers(1, count))) | {count})
    writes = {k for k, (operator, _) in enumerate(model.steps) if operator.split(".")[1][-1] == "_"}
    description = describe(
        model.steps,
        cuts=[cut for cut in cuts if cut not in writes],
        tensors=model.tensors,
        shape=(CHANNELS, *SIZES),
        dtype=torch.float64,
        state_dtype=torch.float64,
    )
    part = read_tiled_part(description)
    units = len(part.network.units)
    borders = [0, *sorted(draw(st.sets(st.integers(1, units - 1)))), units] if units > 1 else [0, 1]
    early = draw(st.sets(st.sampled_from(borders)))
    weights = [draw(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=3)) for _ in range(2)]
    try:
        layout = GridLayout(
            part.network.with_early(early),
            (weights[0], weights[1]),
            borders,
            aligned=draw(st.booleans()),
        )
    except GridError:
        assume(False)
        raise
    return description, part, layout


@settings(max_examples=13, deadline=None)
@given(drawn(), st.integers(0, 999), st.booleans())
def test_tiles_give_what_the_nodes_give(
    model: tuple[ModelDescription, TiledPart, GridLayout], seed: int, apart: bool
) -> None:
    description, part, layout = model
    torch.manual_seed(seed)
    x = torch.randn(2, CHANNELS, *SIZES, dtype=torch.float64)
    state = {
        tensor.name: torch.randn(tensor.shape, dtype=torch.float64) / 2
        for tensor in description.tensors
    }
    plain = {t.name: state[t.name].clone().requires_grad_(t.trainable) for t in description.tensors}
    values = run_nodes(description.train.nodes[: part.stop], x, plain)
    map_of = {number: value for value, number in part.leaving}
    expected = [values[map_of[number].index] for number in part.network.leaving]
    gradients = [torch.randn_like(value) for value in expected]
    try:
        torch.autograd.backward(expected, gradients)
    except RuntimeError as error:  # the model writes to what its own backward needs
        assume("modified by an inplace operation" not in str(error))
        raise
    devices = range(layout.tiles) if apart else [0] * layout.tiles
    own = [{n: t.clone() for n, t in state.items()} for _ in {*devices}]
    tiles = Tiles(description, part, layout, own, device_of_tile=devices)
    made = tiles.forward(0, [x])
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-9)
    tiles.backward(0, gradients)
    tiles.sum_gradients()
    for name, tensor in tiles.replicas[0].items():
        torch.testing.assert_close(tensor.detach(), plain[name].detach(), rtol=1e-9, atol=1e-9)
        if tensor.requires_grad and plain[name].grad is not None:
            close(tensor.grad, plain[name].grad)


def close(ours: Tensor | None, theirs: Tensor) -> None:
    """Gradients to 1e-8 of the largest; none at all is nothing."""
    found = torch.zeros_like(theirs) if ours is None else ours
    assert (found - theirs).abs().max() <= 1e-8 * max(theirs.abs().max().item(), 1.0)


def run_nodes(nodes: Sequence[GraphNode], x: Tensor, state: dict[str, Tensor]) -> list[Tensor]:
    """Every node's value."""
    values: list[Tensor] = []

    def value(argument: Argument) -> Any:
        if isinstance(argument, InputRef):
            return x
        if isinstance(argument, NodeRef):
            return values[argument.index]
        if isinstance(argument, StateRef):
            return state[argument.name]
        return [value(item) for item in argument] if isinstance(argument, tuple) else argument

    for node in nodes:
        call = resolve(node.operator).call
        values += [call(*(value(argument) for argument in node.args))]
    return values
