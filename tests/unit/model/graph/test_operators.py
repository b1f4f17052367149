"""The allow-list: what models may apply, and what is known of each operator."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.effects import (
    aliased_references,
    draws_random_numbers,
    mutated_references,
)
from p2ptrain.model.graph.nodes import Argument, GraphNode, InputRef, NodeRef, StateRef
from p2ptrain.model.graph.operators import is_allowed, name_of, resolve


def _node(operator: str, *args: Argument, **kwargs: Argument) -> GraphNode:
    return GraphNode("n", operator, args, tuple(kwargs.items()), True)


@pytest.mark.parametrize(
    "name",
    [
        "aten.linear.default",
        "aten.relu_.default",
        "aten.__and__.Tensor",
        "aten.cat.default",
        "aten.slice.Tensor",
        "aten.index_put_.default",
        "aten.scaled_dot_product_attention.default",
        "operator.getitem",
        "torch.sym_max",
    ],
)
def test_what_models_use_is_allowed(name: str) -> None:
    assert is_allowed(name)
    assert callable(resolve(name).call)


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.resize_.default",
        "aten.add.out",
        "aten.record_stream.default",
        "aten.binomial.default",
        "aten.range.step",
        "aten.special_legendre_polynomial_p.n_scalar",
        "aten.special_laguerre_polynomial_l.n_scalar",
        "aten._cudnn_rnn.default",
        "aten.linear.nothing",
        "aten.linear",
        "aten..default",
        "operator.pow",
        "operator.attrgetter",
        "builtins.eval",
        "prims.add.default",
        "c10d.send.default",
        "",
    ],
)
def test_everything_else_is_refused(name: str) -> None:
    assert not is_allowed(name)
    with pytest.raises(ProtocolError):
        resolve(name)


def test_names_lead_back_to_the_functions() -> None:
    overload = torch.ops.aten.linear.default
    assert name_of(overload) == "aten.linear.default"
    assert resolve("aten.linear.default").call is overload
    assert name_of(torch.sym_max) == "torch.sym_max"
    assert name_of(print) is None


def test_writes() -> None:
    x, mean, var = InputRef(0), StateRef("mean"), StateRef("var")
    norm = "aten.batch_norm.default"
    assert mutated_references(_node(norm, x, None, None, mean, var, True)) == (mean, var)
    assert mutated_references(_node(norm, x, None, None, mean, var, False)) == ()
    assert mutated_references(_node("aten.add_.Tensor", x, mean)) == (x,)
    assert mutated_references(_node("aten.add.Tensor", x, mean)) == ()


def test_views() -> None:
    x, y = InputRef(0), NodeRef(1)
    assert aliased_references(_node("aten.view.default", x, (1,))) == (x,)
    assert aliased_references(_node("aten.add_.Tensor", x, y)) == (x,)
    assert aliased_references(_node("aten.dropout.default", x, 0.0, False)) == (x,)
    assert aliased_references(_node("aten.add.Tensor", x, y)) == ()


def test_randomness() -> None:
    x = InputRef(0)
    attention = "aten.scaled_dot_product_attention.default"
    assert draws_random_numbers(_node("aten.dropout.default", x, 0.1, True))
    assert not draws_random_numbers(_node("aten.dropout.default", x, 0.1, False))
    assert not draws_random_numbers(_node("aten.dropout.default", x, 0.0, True))
    assert draws_random_numbers(_node("aten.randn_like.default", x))
    assert draws_random_numbers(_node(attention, x, x, x, dropout_p=0.1))
    assert not draws_random_numbers(_node(attention, x, x, x))
    assert not draws_random_numbers(_node("aten.relu.default", x))


@pytest.mark.parametrize("name", ["cauchy_", "log_normal_", "geometric_", "exponential_"])
def test_distributions_draw_random_numbers(name: str) -> None:
    assert draws_random_numbers(_node(f"aten.{name}.default", InputRef(0), 1.0))
