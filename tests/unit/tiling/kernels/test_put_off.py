"""Which filters' gradients wait in a backward of tiles, and that they are plain torch's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from p2ptrain.model.graph.nodes import Argument, NodeRef, StateRef
from p2ptrain.model.stage.split_backward import accumulate
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels import tile_pass
from p2ptrain.tiling.kernels.device_pass import DevicePass
from p2ptrain.tiling.kernels.kernels import cut_region
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.tile_program import TileProgram
from tests.support.tiled_descriptions import (
    CHANNELS,
    HEIGHT,
    IMAGE,
    WEIGHT,
    WIDTH,
    convolution,
    describe,
)
from tests.support.tiling_in_process import replica, trained
from tests.unit.tiling.kernels.test_drawn_models import run_nodes

Step = tuple[str, tuple[Argument, ...]]
FILTERS = (CHANNELS, CHANNELS, 3, 3)
FIRST, BLOCK, BIAS = StateRef("first"), StateRef("block"), StateRef("bias")
RUNNING = StateRef("running_mean"), StateRef("running_var")


def filtered(source: Argument, weight: StateRef, bias: StateRef | None = None) -> Step:
    """3x3, same size."""
    return "aten.conv2d.default", (source, weight, bias, (1, 1), (1, 1))


def relu(node: int) -> Step:
    return "aten.relu.default", (NodeRef(node),)


def plus(node: int, other: Argument, *, in_place: bool = False) -> Step:
    return f"aten.add{'_' if in_place else ''}.Tensor", (NodeRef(node), other)


def normalised(node: int) -> Step:
    return "aten.batch_norm.default", (NodeRef(node), None, None, *RUNNING, True, 0.1, 1e-5, False)


TIED_AT_THE_IMAGE = [
    convolution(IMAGE),
    relu(0),
    convolution(NodeRef(1)),
    plus(2, IMAGE),
]
"""The first use cannot be split: nothing flows to the image."""

TIED_BLOCKS = [
    filtered(IMAGE, FIRST),
    convolution(NodeRef(0)),
    plus(1, NodeRef(0)),
    relu(2),
    convolution(NodeRef(3)),
    plus(4, NodeRef(3)),
]

RESIDUAL = [
    filtered(IMAGE, FIRST),
    relu(0),
    filtered(NodeRef(1), BLOCK, BIAS),
    plus(2, NodeRef(1)),
    relu(3),
    convolution(NodeRef(4)),
    plus(5, NodeRef(4), in_place=True),
    plus(6, NodeRef(3)),
]

RESIDUAL_NORMALISED = [
    filtered(IMAGE, FIRST),
    relu(0),
    filtered(NodeRef(1), BLOCK),
    normalised(2),
    plus(3, NodeRef(1)),
    relu(4),
]


@pytest.mark.parametrize(
    ("steps", "put_off"),
    [
        (TIED_AT_THE_IMAGE, ()),
        (TIED_BLOCKS, ("conv.weight",)),
        (RESIDUAL, ("conv.weight", "block", "bias")),
        (RESIDUAL_NORMALISED, ("block",)),
    ],
    ids=["tied at the image", "tied blocks", "residual", "residual, normalised"],
)
@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_put_off_gradients_are_plain_torchs(
    monkeypatch: pytest.MonkeyPatch,
    steps: Sequence[Step],
    put_off: Sequence[str],
    grid: tuple[int, int],
) -> None:
    """All in one group, so that segments hold blocks and all uses of a filter."""
    added: list[Tensor] = []

    def spy(parameter: torch.nn.Parameter, gradient: Tensor | None) -> None:
        added.append(parameter)
        accumulate(parameter, gradient)

    monkeypatch.setattr(tile_pass, "accumulate", spy)
    last = len(steps) - 1
    read = {reference for _, arguments in steps for reference in arguments}
    names = {r.name for r in read if isinstance(r, StateRef)} | {WEIGHT.name}
    sizes = {FIRST.name: FILTERS, BLOCK.name: FILTERS, BIAS.name: (CHANNELS,)}
    sizes |= {reference.name: (CHANNELS,) for reference in RUNNING}
    description = describe(
        [*steps, ("aten.mean.default", (NodeRef(last),))],
        cuts=[last + 1],
        tensors={name: size for name, size in sizes.items() if name in names},
        dtype=torch.float64,
        state_dtype=torch.float64,
    )
    torch.manual_seed(3)
    x = torch.randn(2, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    state = {t.name: torch.randn(t.shape, dtype=torch.float64) / 3 for t in description.tensors}
    plain = {t.name: state[t.name].clone().requires_grad_(t.trainable) for t in description.tensors}
    expected = run_nodes(description.train.nodes[: last + 1], x, plain)[last]
    gradient = torch.randn_like(expected)
    expected.backward(gradient)  # type: ignore[no-untyped-call]

    part = read_tiled_part(description)
    layout = GridLayout(part.network, ([1.0] * grid[0], [1.0] * grid[1]), (0, 1))
    tensors = replica(description, part, {n: t.clone() for n, t in state.items()})
    tiles = range(layout.tiles)
    device = DevicePass(
        {t: TileProgram(description, part, layout, t, tensors, tracks=not t) for t in tiles}, len(x)
    )
    (entering,), (leaving,) = part.network.entering, part.network.leaving

    def at(tile: int, number: int, whole: Tensor) -> Tensor:
        owned = layout.input_region if number == entering else layout.owned
        region = owned(tile, number)
        rows, columns = region.rows, region.columns
        return cut_region(whole, (slice(rows.first, rows.end), slice(columns.first, columns.end)))

    device.begin_forward({t: {entering: at(t, entering, x)} for t in tiles})
    device.begin_backward({t: {leaving: at(t, leaving, gradient)} for t in tiles})
    while device.is_waiting:
        device.receive([])

    assert {id(p) for p in added} == {id(tensors[name]) for name in put_off}
    for name, parameter in trained(tensors).items():
        found, wanted = parameter.grad, plain[name].grad
        assert found is not None
        assert wanted is not None
        assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()
