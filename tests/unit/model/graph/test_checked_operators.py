"""Operators that trust values in tensors: devices look at those before they run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2ptrain.model.graph.operators import resolve
from p2ptrain.model.graph.packed_sequences import full_lengths
from p2ptrain.model.tracing.function_modes import aten_name

_GROUPED = "aten._grouped_mm.default"
_PACK = "aten._pack_padded_sequence.default"
_PAD = "aten._pad_packed_sequence.default"


@pytest.mark.parametrize("ends", [[2, 60], [-5, 6], [6, 2], [7, 7]])
def test_groups_that_are_not_there_are_refused(ends: list[int]) -> None:
    product = resolve(_GROUPED).call
    rows, matrices = torch.ones(6, 8), torch.ones(2, 8, 8)
    with pytest.raises(IndexError):
        product(rows, matrices, torch.tensor(ends, dtype=torch.int32))
    made = product(rows, matrices, torch.tensor([2, 6], dtype=torch.int32))
    assert torch.equal(made, torch.full((6, 8), 8.0))


@pytest.mark.parametrize("lengths", [[3, 0], [1 << 40, 1], [-1, -1], [], [[3], [2]]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(IndexError):
        resolve(_PACK).call(torch.ones(2, 4, 5), torch.tensor(lengths, dtype=torch.int64), True)


@pytest.mark.parametrize(
    ("sizes", "length"), [([2, 1, 2], 3), ([1, 1], 2), ([-2, 7], 2), ([3, 2], 1 << 60), ([], 1)]
)
def test_batch_sizes_that_do_not_fit_are_refused(sizes: list[int], length: int) -> None:
    with pytest.raises(IndexError):
        resolve(_PAD).call(
            torch.ones(5, 4), torch.tensor(sizes, dtype=torch.int64), True, 0, length
        )


def test_packed_and_padded_again() -> None:
    x, lengths = torch.rand(2, 4, 5), torch.tensor([3, 2])
    data, sizes = resolve(_PACK).call(x, lengths, True)
    padded, found = resolve(_PAD).call(data, sizes, True, 0.0, 4)
    assert torch.equal(found, lengths)
    assert torch.equal(padded[0, :3], x[0, :3])
    assert not padded[1, 2:].any()
    with full_lengths():
        assert resolve(_PACK).call(x, torch.zeros(2, dtype=torch.int64), True)[0].shape == (8, 5)


def test_names_of_stand_ins_and_of_operators_with_generators() -> None:
    assert aten_name("p2ptrain.lstm.data") == "aten.lstm.data"
    assert aten_name("aten.randn.generator") == "aten.randn.default"
    assert aten_name("aten.randint.low_generator") == "aten.randint.low"
    assert aten_name("aten.relu.default") == "aten.relu.default"
    assert aten_name(None) is None


@pytest.mark.parametrize(
    ("lengths", "axis"),
    [
        ([3, 1 << 30], 0),
        ([-1, 7], 0),
        ([1 << 62, 1 << 62, 1 << 62, 1 << 62, 6], 0),
        ([2, 3], 0),
        ([[4], [4], [4]], 0),
        ([[2, 2]] * 100, 1),
        ([4], 1),
    ],
)
def test_segments_that_are_not_there_are_refused(lengths: list[Any], axis: int) -> None:
    reduce = resolve("aten.segment_reduce.default").call
    data = torch.ones(6, 4)
    with pytest.raises(IndexError):
        reduce(data, "sum", lengths=torch.tensor(lengths), axis=axis, unsafe=True)
    made = reduce(data, "sum", lengths=torch.tensor([2, 4]), unsafe=True)
    assert torch.equal(made, torch.tensor([[2.0] * 4, [4.0] * 4]))
    with full_lengths():
        made = reduce(data, "sum", lengths=torch.tensor([0, 0]))
    assert torch.equal(made, torch.tensor([[6.0] * 4, [0.0] * 4]))


def test_segments_by_their_borders_are_refused() -> None:
    with pytest.raises(IndexError):
        resolve("aten.segment_reduce.default").call(
            torch.ones(6), "sum", offsets=torch.tensor([0, 1 << 30])
        )


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(
    ("kernel", "output", "sample", "channels"),
    [
        (2, 4, 1e6, 1),
        (2, 4, -3.0, 1),
        (2, 4, 1.0, 1),
        (2, 4, float("nan"), 1),
        (0, 4, 0.5, 1),
        (-1, 4, 0.5, 1),
        (2, 0, 0.5, 1),
        (2, 4, 0.5, 2),
    ],
)
def test_windows_that_are_not_there_are_refused(
    dimensions: int, kernel: int, output: int, sample: float, channels: int
) -> None:
    pool = resolve(f"aten.fractional_max_pool{dimensions}d.default").call
    maps = torch.rand(2, 1, *(8,) * dimensions)
    samples = torch.full((2, channels, dimensions), sample)
    with pytest.raises(IndexError):
        pool(maps, [kernel] * dimensions, [output] * dimensions, samples)
    fitting = torch.full((2, 1, dimensions), 0.5)
    made, _ = pool(maps, [2] * dimensions, [4] * dimensions, fitting)
    assert made.max() == maps.max()
    with full_lengths():
        pool(maps, [2] * dimensions, [4] * dimensions, fitting * 7)


@pytest.mark.parametrize("pivot", [0, -1, 5, 1 << 30])
def test_pivots_that_are_no_rows_are_refused(pivot: int) -> None:
    """By torch itself."""
    pivots = torch.tensor([1, 2, 3, pivot], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="ivots"):
        resolve("aten.linalg_lu_solve.default").call(torch.eye(4), pivots, torch.ones(4, 1))
    with pytest.raises(RuntimeError, match="ivots"):
        resolve("aten.lu_unpack.default").call(torch.eye(4), pivots)


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize(
    ("shape", "types"),
    [
        ((2, 3), (torch.float32, torch.float32)),
        ((2, 5), (torch.float64, torch.float32)),
        ((2, 5), (torch.float32, torch.float16)),
    ],
)
def test_derivatives_of_softmax_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, int], types: tuple[torch.dtype, torch.dtype]
) -> None:
    derivative = resolve(f"aten.{name}_backward_data.default").call
    output = torch.rand(2, 5)
    with pytest.raises(IndexError):
        derivative(torch.ones(shape, dtype=types[0]), output, 1, types[1])
    assert derivative(torch.ones(2, 5), output, 1, torch.float32).shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "dtype", "biases"),
    [
        ((2, 4, 6), torch.float32, [4]),
        ((2, 3, 5), torch.float32, [4]),
        ((2, 4, 5), torch.float64, [4]),
        ((2, 4, 5), torch.float32, [400]),
    ],
)
def test_derivatives_of_convolutions_that_do_not_fit_are_refused(
    shape: tuple[int, int, int], dtype: torch.dtype, biases: list[int]
) -> None:
    derivative = resolve("aten.convolution_backward.default").call
    maps, weight = torch.rand(2, 3, 7), torch.rand(4, 3, 3)
    settings = ([1], [0], [1], False, [0], 1, [True, True, True])
    with pytest.raises(IndexError):
        derivative(torch.ones(shape, dtype=dtype), maps, weight, biases, *settings)
    found = derivative(torch.ones(2, 4, 5), maps, weight, [4], *settings)
    assert [gradient.shape for gradient in found] == [maps.shape, weight.shape, (4,)]


@pytest.mark.parametrize(
    ("shape", "rows", "weight", "dtype"),
    [
        ((2, 4), 2, 5, torch.float32),
        ((2, 5), 1, 5, torch.float32),
        ((2, 5), 2, 4, torch.float32),
        ((2, 5), 2, 5, torch.float64),
    ],
)
def test_derivatives_of_layer_norms_that_do_not_fit_are_refused(
    shape: tuple[int, int], rows: int, weight: int, dtype: torch.dtype
) -> None:
    derivative = resolve("aten.native_layer_norm_backward.default").call
    x, mask = torch.rand(2, 5), [True, True, True]
    parts = (torch.ones(rows, 1), torch.ones(rows, 1), torch.ones(weight), torch.ones(weight))
    with pytest.raises(IndexError):
        derivative(torch.ones(shape, dtype=dtype), x, [5], *parts, mask)
    fitting = (torch.ones(2, 1), torch.ones(2, 1), torch.ones(5), torch.ones(5))
    found = derivative(torch.ones(2, 5), x, [5], *fitting, mask)
    assert [gradient.shape for gradient in found] == [x.shape, (5,), (5,)]


@pytest.mark.parametrize(
    ("targets", "classes", "weights", "gradient"),
    [
        ([0, 5], 5, 5, torch.ones(())),
        ([0, -1], 5, 5, torch.ones(())),
        ([0], 5, 5, torch.ones(())),
        ([0, 1], 5, 4, torch.ones(())),
        ([0, 1], 5, 5, torch.ones(2)),
        ([0, 1], 5, 5, torch.ones((), dtype=torch.float64)),
    ],
)
def test_derivatives_of_losses_over_no_classes_are_refused(
    targets: list[int], classes: int, weights: int, gradient: torch.Tensor
) -> None:
    derivative = resolve("aten.nll_loss_backward.default").call
    scores, total = torch.rand(2, classes), torch.ones(())
    with pytest.raises(IndexError):
        derivative(gradient, scores, torch.tensor(targets), torch.ones(weights), 1, -100, total)
    fitting = torch.tensor([0, -100]), torch.ones(classes), 1, -100, total
    made = derivative(torch.ones(()), scores, *fitting)
    assert torch.equal(made, torch.tensor([[-1.0, 0, 0, 0, 0], [0.0] * 5]))


@pytest.mark.parametrize("pivots", [[], [1, 2], [[1, 2, 3]]])
def test_as_many_pivots_as_rows(pivots: list[Any]) -> None:
    unpack = resolve("aten.lu_unpack.default").call
    with pytest.raises(IndexError):
        unpack(torch.eye(3), torch.tensor(pivots, dtype=torch.int32))
    _, lower, _ = unpack(torch.eye(3), torch.tensor([1, 2, 3], dtype=torch.int32))
    assert torch.equal(lower, torch.eye(3))


@pytest.mark.parametrize("name", ["_upsample_bilinear2d_aa", "upsample_bicubic2d"])
def test_a_picture_has_the_size_that_its_scale_makes_it(name: str) -> None:
    grow, picture = resolve(f"aten.{name}.default").call, torch.rand(1, 3, 6, 6)
    with pytest.raises(IndexError):
        grow(picture, [4, 9], False, 1e-5, None)
    with pytest.raises(IndexError):
        grow(picture, [4, 9], False, scales_w=1.0)
    assert grow(picture, [4, 9], False, 0.7, 1.5).shape == (1, 3, 4, 9)
    assert grow(picture, [4, 9], False).shape == (1, 3, 4, 9)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("aten.rnn_tanh.data", (4, torch.zeros(1, 2, 5), [], True, 1, 0.0, True, False)),
        ("aten.embedding_bag.default", (torch.tensor([1]), 0)),
        ("aten.lu_unpack.default", (1,)),
        (_GROUPED, (torch.ones(2, 3, 4), 7)),
    ],
)
def test_a_number_is_no_tensor_to_them(operator: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(IndexError, match="tensor"):
        resolve(operator).call(torch.ones(3, 3), *arguments)


def test_bags_of_which_there_is_none_are_refused() -> None:
    bags, table, words = resolve("aten.embedding_bag.default").call, torch.rand(6, 4), [0, 1]
    ends = torch.tensor([0, 2])
    made, *_ = bags(table, torch.tensor(words), ends, False, 0, False, None, True)
    assert torch.equal(made, table[:2].sum(0, keepdim=True))
    with pytest.raises(IndexError):
        bags(table, torch.tensor(words), ends[:1], False, 0, False, None, True)
