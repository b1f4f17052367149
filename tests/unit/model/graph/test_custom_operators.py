"""The operator that joins outputs and a backward which is not autograd's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from p2ptrain.model.graph.custom_operators import own_backward
from p2ptrain.model.graph.nodes import BackwardGraph, GraphNode, InputRef, NodeRef
from p2ptrain.model.stage.instructions import BoundBackward


def _given(seen: list[Sequence[Any]]) -> Any:
    def backward(values: Sequence[Any]) -> list[Tensor | None]:
        seen.append(values)
        return [values[0] * 3]

    return backward


def test_the_backward_gets_what_arrives_and_what_was_kept() -> None:
    seen: list[Sequence[Any]] = []
    x = torch.ones(2, requires_grad=True)
    outputs, kept = [torch.ones(2), torch.zeros(3)], [torch.full((4,), 7.0), 5]
    one, other = own_backward(outputs, [x], kept, _given(seen))
    one.sum().backward()
    ((arrived, unused, tensor, number),) = seen
    assert torch.equal(arrived, torch.ones(2))
    assert torch.equal(unused, torch.zeros(3))  # for the output that nothing has used
    assert torch.equal(tensor, kept[0])
    assert number == 5
    assert torch.equal(x.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]
    assert other.requires_grad


def test_outputs_that_arrived_from_elsewhere_stay_as_they_are() -> None:
    x, output = torch.ones(2, requires_grad=True), torch.ones(2)
    (joined,) = own_backward([output], [x], [], _given([]))
    assert joined.requires_grad
    assert not output.requires_grad
    assert joined.data_ptr() == output.data_ptr()


def test_without_gradients_nothing_is_joined() -> None:
    x, output = torch.ones(2, requires_grad=True), torch.ones(2)
    with torch.no_grad():
        assert own_backward([output], [x], [], _given([]))[0] is output


def test_a_graph_writes_to_copies_of_what_it_is_given() -> None:
    doubled = GraphNode("n0", "aten.mul_.Tensor", (InputRef(0), InputRef(1)), (), False)
    run = BoundBackward(BackwardGraph((doubled,), (NodeRef(0), None, InputRef(1))), 4)
    arriving, kept = torch.ones(3), torch.full((3,), 2.0)
    first, none, second = run([arriving, kept])
    assert torch.equal(first, kept)  # type: ignore[arg-type]
    assert none is None
    assert second is kept
    assert torch.equal(arriving, torch.ones(3))
