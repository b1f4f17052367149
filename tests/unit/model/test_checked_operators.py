"""Operators that trust values in tensors: devices look at those before they run them."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.model.operators import resolve
from p2ptrain.model.packed import full_lengths
from p2ptrain.model.stand_ins import aten_name

_PACK = "aten._pack_padded_sequence.default"
_PAD = "aten._pad_packed_sequence.default"


@pytest.mark.parametrize("ends", [[2, 60], [-5, 6], [6, 2], [7, 7]])
def test_groups_that_are_not_there_are_refused(ends: list[int]) -> None:
    product = resolve("aten._grouped_mm.default").call
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
