"""What is read from tensors in one go is what single samples give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.checked_dataset import CheckedDataset, tensor_rows

INPUTS, TARGETS = torch.randn(12, 3, 4, 4), torch.randint(9, (12,))
WHOLE = TensorDataset(INPUTS, TARGETS)


class _OneByOne(Dataset[Any]):
    """The same samples, and nothing that could be looked into."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


DATASETS = {
    "tensors": WHOLE,
    "subset": Subset(WHOLE, [7, 1, 1, 10, 3]),
    "subset of a subset": Subset(Subset(WHOLE, [7, 1, 9, 10, 3]), [4, 0, 2, 1, 3]),
    "random split": random_split(WHOLE, [5, 7])[0],
    "from the end": Subset(WHOLE, range(-4, 2)),
    "indices in a tensor": Subset(WHOLE, torch.tensor([7, 1, 9, 10, 3])),  # type: ignore[arg-type]
    "channels last": TensorDataset(INPUTS.to(memory_format=torch.channels_last), TARGETS),
    "takes gradients": TensorDataset(INPUTS.clone().requires_grad_(), TARGETS),
    "a view": TensorDataset(INPUTS.transpose(1, 3)[:, 1:], TARGETS),
}


@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_samples_read_one_by_one(name: str) -> None:
    data = DATASETS[name]
    assert tensor_rows(data) is not None
    for indices in ([4, 0, 2], [1], [3, 3]):
        found = CheckedDataset(data).collate(indices, "seed")
        expected = CheckedDataset(_OneByOne(data)).collate(indices, "seed")
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
            assert not ours.requires_grad


def test_a_batch_is_memory_of_its_own() -> None:
    inputs, _ = CheckedDataset(WHOLE).collate([0], "seed")
    inputs.zero_()
    assert bool(INPUTS[0].any())


class _Flipped(TensorDataset):
    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        return image.flip(-1), label


@pytest.mark.parametrize(
    "data",
    [
        _Flipped(INPUTS, TARGETS),
        Subset(_Flipped(INPUTS, TARGETS), [0, 1, 2]),
        TensorDataset(INPUTS.to_sparse(), TARGETS),
        [(image, label) for image, label in WHOLE],
    ],
    ids=["derived", "subset of a derived one", "sparse", "a list"],
)
def test_other_datasets_are_read_sample_by_sample(data: Any) -> None:
    assert tensor_rows(data) is None


def test_three_tensors_are_no_pair() -> None:
    three = TensorDataset(INPUTS, INPUTS, TARGETS)
    assert tensor_rows(three) is None
    with pytest.raises(ScriptError, match="must be a pair"):
        CheckedDataset(three)


def test_a_sample_that_is_not_there_is_named() -> None:
    samples = CheckedDataset(Subset(WHOLE, [0, 12]))
    with pytest.raises(ScriptError, match=r"data\[1\] failed: IndexError"):
        samples.collate([0, 1], "")
