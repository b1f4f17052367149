"""Behind which units a tiled stage may end, and why behind none."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.job.rounds import RoundMode
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import NodeRef
from p2ptrain.runtime.tiled.tile_layout import tileable, tiled_units
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.tileable_operators import NotTiled
from p2ptrain.tiling.planning.profile_maps import unit_windows
from tests.support.tiled_descriptions import CHANNELS, HEIGHT, IMAGE, WIDTH, convolution, describe
from tests.support.tiling_in_process import Tiles
from tests.unit.tiling.kernels.test_drawn_models import run_nodes

MEAN = ("aten.mean.default", (NodeRef(4),))


def summed(*, dtype: torch.dtype = torch.float32) -> ModelDescription:
    """`a(x) + a(tanh(x))` and a convolution, each operator a unit; then the loss."""
    steps = [
        convolution(IMAGE),
        ("aten.tanh.default", (IMAGE,)),
        convolution(NodeRef(1)),
        ("aten.add.Tensor", (NodeRef(0), NodeRef(2))),
        convolution(NodeRef(3)),
        MEAN,
    ]
    return describe(steps, cuts=[1, 2, 3, 4, 5], dtype=dtype, state_dtype=dtype)


def test_a_chain_may_end_behind_each_unit() -> None:
    steps = [convolution(IMAGE), *(convolution(NodeRef(k)) for k in range(4)), MEAN]
    network = tileable(describe(steps, cuts=[1, 2, 3, 4, 5]))
    assert (network.least, len(network.units)) == (1, 5)


def test_tiles_may_end_where_nobody_behind_reads_the_input() -> None:
    description = summed()
    network = tileable(description)
    assert (network.least, len(network.units)) == (2, 5)
    for units in range(2, 6):
        for mode in RoundMode:
            assert len(tiled_units(description, units, mode).network.units) == units
    with pytest.raises(NotTiled, match="layer unit1 reads the model's input input_0 too"):
        tiled_units(description, 1, RoundMode.TRAIN)
    assert unit_windows(network) == ()


def test_what_reads_the_input_behind_all_tiles_is_named_with_what_ends_them() -> None:
    steps = [
        convolution(IMAGE),
        convolution(NodeRef(0)),
        ("aten.softmax.int", (NodeRef(1), 2)),
        ("aten.add.Tensor", (NodeRef(2), IMAGE)),
        ("aten.mean.default", (NodeRef(3),)),
    ]
    reasons = (
        r"^tiling ends in layer unit2 at node2 \(aten.softmax.int\): it is no operator that works "
        r"on tiles; layer unit3 reads the model's input input_0 too, which only tiles have$"
    )
    with pytest.raises(NotTiled, match=reasons):
        tileable(describe(steps, cuts=[1, 2, 3, 4]))


def test_the_input_under_another_name_stays_with_the_tiles_too() -> None:
    steps = [
        ("aten.dropout.default", (IMAGE, 0.5, False)),
        convolution(NodeRef(0)),
        ("aten.add.Tensor", (NodeRef(1), NodeRef(0))),
        ("aten.mean.default", (NodeRef(2),)),
    ]
    with pytest.raises(NotTiled, match="layer unit1 reads the model's input input_0 too"):
        tiled_units(describe(steps, cuts=[2, 3]), 1, RoundMode.TRAIN)


@pytest.mark.parametrize("borders", [(0, 2), (0, 1, 3), (0, 1, 2, 3, 5)])
def test_groups_may_meet_where_the_stage_may_not_end(borders: tuple[int, ...]) -> None:
    """Every tile has what it needs of the images in all groups."""
    units = borders[-1]
    description = summed(dtype=torch.float64)
    torch.manual_seed(0)
    images = torch.randn(2, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    state = {"conv.weight": torch.randn(CHANNELS, CHANNELS, 3, 3, dtype=torch.float64)}
    plain = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    values = run_nodes(description.train.nodes[:units], images, plain)
    part = tiled_units(description, units, RoundMode.TRAIN)
    expected = [values[value.index] for value, _ in part.leaving]
    gradients = [torch.randn_like(value) for value in expected]
    flowing = [pair for pair in zip(expected, gradients, strict=True) if pair[0].requires_grad]
    torch.autograd.backward(*zip(*flowing, strict=True))

    layout = GridLayout(part.network, ([0.4, 0.6], [0.5, 0.5]), borders)
    tiles = Tiles(description, part, layout, [state], device_of_tile=[0] * 4)
    for ours, theirs in zip(tiles.forward(0, [images]), expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
    tiles.backward(0, gradients)
    gradient = tiles.replicas[0]["conv.weight"].grad
    torch.testing.assert_close(gradient, plain["conv.weight"].grad, rtol=1e-12, atol=1e-12)
