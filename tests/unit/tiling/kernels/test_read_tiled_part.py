"""Which nodes can be tiled, and what is said of the first that cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2ptrain.model.graph.nodes import Argument, NodeRef, StateRef
from p2ptrain.plan.types.feature_maps import ELEMENTWISE, AxisWindow
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from p2ptrain.tiling.kernels.tileable_operators import NotTiled
from tests.support.tiled_descriptions import CHANNELS, IMAGE, WEIGHT, convolution, describe

LOSS = ("aten.mean.default", (NodeRef(0),))
VECTOR = {"vector": (CHANNELS,), "running": (CHANNELS,), "per_channel": (CHANNELS, 1, 1)}
PLACES = {"places": (CHANNELS, 12, 10)}


def test_maps_and_windows() -> None:
    description = describe(
        [
            convolution(IMAGE),
            ("aten.relu_.default", (NodeRef(0),)),
            ("aten.max_pool2d.default", (NodeRef(1), (3, 2), (2, 2), (1, 0), 1, True)),
            ("aten.add.Tensor", (NodeRef(2), StateRef("per_channel"))),
            ("aten.mean.default", (NodeRef(3),)),
        ],
        cuts=[2, 4],
        tensors=VECTOR,
    )
    part = read_tiled_part(description)
    maps = [(m.height, m.width, m.differentiable) for m in part.network.maps]
    assert maps == [(12, 10, False), (12, 10, True), (12, 10, True), (7, 5, True), (7, 5, True)]
    windows = [(o.rows, o.columns) for o in part.network.operations]
    assert windows[0] == (AxisWindow(3, 1, 1, 1, 1), AxisWindow(3, 1, 1, 1, 1))
    assert windows[2] == (AxisWindow(3, 2, 1, 1, 1), AxisWindow(2, 2))
    assert windows[3] == (ELEMENTWISE, ELEMENTWISE)
    assert [(u.name, u.first, u.end) for u in part.network.units] == [
        ("unit0", 0, 2),
        ("unit1", 2, 4),
    ]
    assert part.network.units[0].parameter_bytes == 4 * CHANNELS * CHANNELS * 9
    assert part.leaving == ((NodeRef(3), 4),)
    assert (part.stop, part.whole) == (4, 2)
    assert part.reason is not None
    assert part.reason.startswith("tiling ends in layer unit2 at node4 (aten.mean.default):")


def test_what_is_written_in_place_is_another_map_for_later_readers() -> None:
    description = describe(
        [
            convolution(IMAGE),
            ("aten.relu_.default", (NodeRef(0),)),
            ("aten.sigmoid.default", (NodeRef(0),)),
            ("aten.mul.Tensor", (NodeRef(2), NodeRef(0))),
            ("aten.mean.default", (NodeRef(3),)),
        ],
        cuts=[4],
    )
    operations = read_tiled_part(description).network.operations
    assert [o.inputs for o in operations] == [(0,), (1,), (2,), (3, 2)]


def test_what_is_written_without_a_record_keeps_its_gradient_so_it_is_not_tiled() -> None:
    description = describe(
        [convolution(IMAGE), ("aten.relu_.default", (NodeRef(0),)), LOSS], cuts=[1]
    )
    nodes = list(description.train.nodes)
    nodes[1] = replace(nodes[1], grad_enabled=False)
    part = read_tiled_part(
        replace(description, train=replace(description.train, nodes=tuple(nodes)))
    )
    assert part.stop == 1
    assert part.reason is not None
    assert "it writes under torch.no_grad()" in part.reason


@pytest.mark.parametrize("operator", ["aten.contiguous.default", "aten.positive.default"])
def test_what_is_given_back_without_a_record_is_the_map_itself_or_not_tiled(operator: str) -> None:
    description = describe(
        [convolution(IMAGE), (operator, (NodeRef(0),)), convolution(NodeRef(1)), LOSS], cuts=[1, 3]
    )
    nodes = list(description.train.nodes)
    nodes[1] = replace(nodes[1], grad_enabled=False)
    part = read_tiled_part(
        replace(description, train=replace(description.train, nodes=tuple(nodes)))
    )
    if operator == "aten.positive.default":
        assert [o.inputs for o in part.network.operations] == [(0,), (1,)]
    else:
        assert part.stop == 1
        assert part.reason is not None
        assert "it may give back its argument, with its gradient" in part.reason


CHANNELS_LAST = (torch.float32, False, False, torch.channels_last)


@pytest.mark.parametrize(
    ("operator", "arguments", "copied"),
    [
        ("aten.to.dtype", (torch.float32,), False),
        ("aten.to.device", (torch.device("cpu"), torch.float32), False),
        ("aten.to.dtype_layout", (), False),
        ("aten.type_as.default", (WEIGHT,), False),
        ("aten.to.dtype", (torch.float32, False, True), True),
        ("aten.to.dtype", CHANNELS_LAST, True),
    ],
)
def test_a_cast_to_the_type_that_a_map_has_changes_nothing(
    operator: str, arguments: tuple[Argument, ...], copied: bool
) -> None:
    """As `x.float()` and `x.to(device)` in forward() are captured."""
    steps = [
        (operator, (IMAGE, *arguments)),
        convolution(NodeRef(0)),
        (operator, (NodeRef(1), *arguments)),
        ("aten.relu.default", (NodeRef(2),)),
        LOSS,
    ]
    part = read_tiled_part(describe(steps, cuts=[4]))
    assert part.stop == 4
    assert len(part.network.operations) == (4 if copied else 2)
    assert part.network.entering == (0,)


BATCH_NORM = (NodeRef(0), StateRef("vector"), StateRef("vector"), StateRef("running"))
REFUSED: list[tuple[str, tuple[Argument, ...], str]] = [
    ("aten.adaptive_avg_pool2d.default", (NodeRef(0), (1, 1)), "no operator that works on tiles"),
    ("aten.mean.dim", (NodeRef(0), (2, 3), True), "no operator that works on tiles"),
    ("aten.flatten.using_ints", (NodeRef(0), 1), "no operator that works on tiles"),
    ("aten.group_norm.default", (NodeRef(0), 2), "no operator that works on tiles"),
    ("aten.softmax.int", (NodeRef(0), 3), "no operator that works on tiles"),
    ("aten.dropout.default", (NodeRef(0), 0.5, True), "random numbers are drawn for the whole"),
    ("aten.mul.Tensor", (NodeRef(0), StateRef("places")), "places differs from position"),
    ("aten.mul.Tensor", (NodeRef(0), StateRef("vector")), "vector differs from position"),
    ("aten.relu.default", (StateRef("vector"),), "does not compute with maps alone"),
    ("aten.pad.default", (NodeRef(0), (1, 1), "reflect"), "pads with reflect values"),
    ("aten.pad.default", (NodeRef(0), (-1, 1)), "does not only add rows and columns"),
    ("aten.cat.default", ((NodeRef(0), NodeRef(0)), 2), "does not join channels"),
    ("aten.conv2d.default", (NodeRef(0), NodeRef(0)), "filters are computed from other values"),
    ("aten.max_pool2d.default", (NodeRef(0), (20, 1)), "window does not fit a map of 12 x 10"),
    ("aten.relu_.default", (IMAGE,), "writes to the model's input"),
    ("aten.batch_norm.default", (*BATCH_NORM, NodeRef(0)), "running_var is computed"),
    ("aten.sym_size.int", (NodeRef(0), 0), "no operator that works on tiles"),
    ("operator.add", (1, 2), "computes with sizes"),
    ("aten.to.dtype", (NodeRef(0), torch.float64), "casts maps of torch.float32 to torch.float64"),
    ("aten.type_as.default", (StateRef("vector"), NodeRef(0)), "does not compute with maps alone"),
]


@pytest.mark.parametrize(("operator", "arguments", "reason"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_tiled_is_named(
    operator: str, arguments: tuple[Argument, ...], reason: str
) -> None:
    if operator == "aten.batch_norm.default":
        arguments = (*arguments, True, 0.1, 1e-5, False)
    description = describe(
        [convolution(IMAGE), (operator, arguments), LOSS], cuts=[1], tensors={**VECTOR, **PLACES}
    )
    part = read_tiled_part(description)
    assert part.whole == 1
    assert part.reason is not None
    assert f"layer unit1 at node1 ({operator})" in part.reason
    assert reason in part.reason


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 12), torch.float32), ((4, 12, 10), torch.uint8), ((4, 12, 10), torch.float64)],
)
def test_a_model_without_images_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(NotTiled, match="layer unit0 at node0"):
        read_tiled_part(describe([convolution(IMAGE), LOSS], shape=shape, dtype=dtype))


def test_whole_units_only() -> None:
    steps = [convolution(IMAGE), convolution(NodeRef(0)), ("aten.mean.default", (NodeRef(1),))]
    description = describe(steps, cuts=[1])
    part = read_tiled_part(description)
    assert (part.stop, part.whole, len(part.network.units)) == (2, 1, 2)
    whole = read_tiled_part(description, whole_units=True)
    assert (whole.stop, whole.whole, len(whole.network.units)) == (1, 1, 1)
    with pytest.raises(NotTiled, match="at node2"):
        read_tiled_part(describe(steps), whole_units=True)


def test_what_is_written_behind_is_not_cut_off() -> None:
    steps = [
        convolution(IMAGE),
        convolution(NodeRef(0)),
        ("aten.mean.default", (NodeRef(1),)),
        ("aten.relu_.default", (NodeRef(1),)),
        ("aten.mean.default", (NodeRef(3),)),
    ]
    part = read_tiled_part(describe(steps, cuts=[1]))
    assert (part.stop, part.whole) == (1, 1)


def test_nor_what_is_written_through_a_view() -> None:
    """Tiling ends at the last place in the unit where no memory is shared over the border."""
    steps = [
        convolution(IMAGE),
        convolution(NodeRef(0)),
        convolution(NodeRef(1)),
        ("aten.flatten.using_ints", (NodeRef(2), 1)),
        ("aten.relu_.default", (NodeRef(3),)),
        ("aten.mean.default", (NodeRef(4),)),
    ]
    part = read_tiled_part(describe(steps, cuts=[1]))
    assert (part.stop, part.whole) == (2, 1)


def test_no_unit_is_tiled_that_makes_no_map() -> None:
    """What is counted in it may be cut off; the map behind it must stay with who writes to it."""
    steps = [
        convolution(IMAGE),
        ("aten.add_.Tensor", (StateRef("running"), 1)),
        convolution(NodeRef(0)),
        ("aten.flatten.using_ints", (NodeRef(2), 1)),
        ("aten.relu_.default", (NodeRef(3),)),
        ("aten.mean.default", (NodeRef(4),)),
    ]
    part = read_tiled_part(describe(steps, cuts=[1], tensors=VECTOR))
    assert (part.stop, part.whole, len(part.network.units)) == (1, 1, 1)


def test_the_unit_in_which_tiling_ends_is_divided() -> None:
    steps = [convolution(IMAGE), convolution(NodeRef(0)), ("aten.mean.default", (NodeRef(1),))]
    description, part = cut_where_tiling_ends(describe(steps, cuts=[1]))
    assert [(u.name, u.train, u.evaluate) for u in description.units] == [
        ("unit0", (0, 1), (0, 1)),
        ("unit1", (1, 2), (1, 2)),
        ("unit1#2", (2, 3), (2, 3)),
    ]
    assert part.whole == 2
    (crossing,) = description.crossing(2, "train")
    assert crossing.shape(5) == (5, CHANNELS, 12, 10)
    assert crossing.may_require_grad
    assert part.reason is not None
    assert "layer unit1 at node2" in part.reason


def test_counters_are_no_operators() -> None:
    steps = [
        ("aten.add_.Tensor", (StateRef("running"), 1)),
        convolution(IMAGE),
        ("aten.mean.default", (NodeRef(1),)),
    ]
    part = read_tiled_part(describe(steps, cuts=[2], tensors=VECTOR))
    assert part.counters == ((0,),)
    assert part.nodes == (1,)
