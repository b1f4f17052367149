from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.model.wire.tensor_layout import TensorLayout

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def test_a_permutation_of_a_dense_tensor_is_dense() -> None:
    assert TensorLayout((2, 3, 4), (1, 8, 2)).is_dense


def test_a_gap_is_not_dense() -> None:
    layout = TensorLayout((2, 3), (4, 1))
    assert not layout.is_dense
    assert (layout.compact_elements, layout.extent) == (6, 7)


def test_overlap_is_not_dense() -> None:
    assert not TensorLayout((3, 2), (1, 1)).is_dense


def test_a_repeated_dimension_counts_once() -> None:
    layout = TensorLayout((5, 3), (0, 1))
    assert layout.is_dense
    assert (layout.compact_shape, layout.extent) == ((1, 3), 3)


def test_strides_of_single_elements_do_not_matter() -> None:
    assert TensorLayout((1, 3, 1), (77, 1, 0)).is_dense


def test_nothing_is_dense_and_has_no_extent() -> None:
    layout = TensorLayout((0, 3), (99, 98))
    assert layout.is_dense
    assert (layout.extent, layout.compact_elements) == (0, 0)


@given(shapes, st.data())
def test_densified_keeps_the_order_of_dimensions(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    tensor = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    layout = TensorLayout(tuple(tensor.shape), tuple(stride * 3 for stride in tensor.stride()))
    dense = layout.densified()
    assert dense.is_dense
    if tensor.numel():
        assert dense.extent == tensor.numel()
        large = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
        assert [dense.strides[d] for d in large] == [tensor.stride(d) for d in large]


@given(shapes)
def test_extent_is_what_torch_allocates(shape: tuple[int, ...]) -> None:
    strides = tuple(range(3, 3 + len(shape)))
    storage = torch.empty_strided(shape, strides, dtype=torch.uint8).untyped_storage()
    assert TensorLayout(shape, strides).extent == storage.nbytes()
