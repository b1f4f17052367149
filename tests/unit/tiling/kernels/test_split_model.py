"""Where a model is cut whose graphs do not both have the place where tiling ends."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from tests.support.tiled_descriptions import IMAGE, convolution, describe


def test_a_graph_without_a_counterpart_ends_at_a_unit() -> None:
    """The evaluation graph pools first: there is no place behind the second convolution."""
    steps = [convolution(IMAGE), convolution(IMAGE), ("aten.mean.default", (IMAGE,))]
    plain = describe(steps, cuts=[1])
    odd = describe(
        [steps[0], ("aten.softmax.int", (IMAGE, 3)), ("aten.mean.default", (IMAGE,))], cuts=[1]
    )
    mixed = replace(plain, evaluate=odd.evaluate)
    description, part = cut_where_tiling_ends(mixed)
    assert description is mixed
    assert (part.stop, part.whole) == (1, 1)
