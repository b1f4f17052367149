"""Sizes with lengths in them, and what tensors show of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.model.graph.values import (
    BATCH,
    Polynomial,
    Term,
    ValueDescription,
    length,
    shows_sizes,
    sizes_of,
)

BATCH_TIMES_LENGTH = Polynomial((0,), (Term(1, (1, 1)),))

numbers = st.integers(1, 50)


def value(*dimensions: Polynomial) -> ValueDescription:
    return ValueDescription("v", torch.float32, dimensions, True)


@given(numbers, numbers, numbers)
def test_shapes_and_bytes(batch: int, first: int, second: int) -> None:
    both = Polynomial((3,), (Term(2, (0, 1)), Term(1, (0, 0, 1))))
    described = value(BATCH, length(0), both)
    shape = (batch, first, 3 + 2 * first + second)
    assert described.shape(batch, first, second) == shape
    assert described.nbytes(batch, first, second) == 4 * batch * first * shape[2]


@given(numbers, numbers)
def test_what_is_known_helps_to_find_the_rest(batch: int, steps: int) -> None:
    flat, rows = value(BATCH_TIMES_LENGTH, Polynomial((8,))), value(BATCH)
    assert sizes_of([(flat, (batch * steps, 8)), (rows, (batch,))], 1) == (batch, steps)
    assert sizes_of([(flat, (batch * steps, 8))], 1) == (None, None)


def test_what_shapes_show() -> None:
    assert shows_sizes([value(BATCH, length(1))], 2) == {0, 2}
    assert shows_sizes([value(BATCH_TIMES_LENGTH), value(length(0))], 1) == {0, 1}
    assert shows_sizes([value(BATCH_TIMES_LENGTH)], 1) == set()


def test_a_length_is_no_dimension_of_samples() -> None:
    assert not length(0).depends_on_batch
    assert BATCH_TIMES_LENGTH.depends_on_batch
    assert not length(0).is_constant
