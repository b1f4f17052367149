"""Polynomials in the batch size, and what a value tells of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.model.graph.values import Polynomial, ValueDescription


def _value(*dimensions: Polynomial) -> ValueDescription:
    return ValueDescription("v", torch.float32, dimensions, True)


@given(constant=st.integers(0, 9), slope=st.integers(1, 9), batch=st.integers(0, 99))
def test_the_batch_follows_from_a_linear_size(constant: int, slope: int, batch: int) -> None:
    polynomial = Polynomial((constant, slope))
    assert polynomial(batch) == constant + slope * batch
    assert polynomial.batch_for(polynomial(batch)) == batch


def test_other_sizes_tell_nothing() -> None:
    assert Polynomial((7,)).batch_for(7) is None
    assert Polynomial((0, 0, 1)).batch_for(9) is None
    assert Polynomial((1, 2)).batch_for(4) is None
    assert Polynomial((5, 1)).batch_for(3) is None


def test_shape_bytes_and_batch() -> None:
    value = _value(Polynomial((0, 3)), Polynomial((0, 0, 1)), Polynomial((4,)))
    assert value.shape(2) == (6, 4, 4)
    assert value.nbytes(2) == 6 * 4 * 4 * 4
    assert value.batch_of((6, 4, 4)) == 2
    assert value.depends_on_batch
    assert not _value(Polynomial((0, 0, 1))).depends_on_batch
