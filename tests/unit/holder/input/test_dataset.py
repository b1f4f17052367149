from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.checked_dataset import CheckedDataset


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b))


DATASETS: dict[str, list[tuple[Any, Any]]] = {
    "tensors": [(torch.full((2, 3), float(i)), torch.tensor(i)) for i in range(5)],
    "numbers": [(i * 0.5, i) for i in range(5)],
    "booleans": [(i * 0.5, i % 2 == 0) for i in range(5)],
    "numpy": [(np.full(3, i, dtype=np.float32), np.int64(i)) for i in range(5)],
    "channels_last": [(torch.randn(4, 4, 3).permute(2, 0, 1), i) for i in range(5)],
    "tuple input": [((torch.ones(2) * i, torch.ones(3)), i) for i in range(5)],
    "dict input": [({"ids": torch.arange(3), "mask": torch.ones(3)}, i) for i in range(5)],
    "nested": [({"a": (1.0, [2, torch.ones(1)])}, {"t": i}) for i in range(5)],
    "bfloat16": [(torch.ones(2, dtype=torch.bfloat16) * i, 1j) for i in range(5)],
}
DATASETS["bfloat16"] = [(x, torch.tensor(1j)) for x, _ in DATASETS["bfloat16"]]


@pytest.mark.parametrize("name", DATASETS)
def test_values_are_default_collates(name: str) -> None:
    data = DATASETS[name]
    inputs, targets = CheckedDataset(data).collate([3, 0, 4], "seed")
    expected = default_collate([data[3], data[0], data[4]])
    assert same(inputs, expected[0])
    assert same(targets, expected[1])


def test_tuples_stay_tuples_and_mappings_become_dicts() -> None:
    wrapped = UserDict({"x": torch.ones(1)})
    data = [((torch.ones(1), [torch.ones(1)]), wrapped)] * 2
    inputs, targets = CheckedDataset(data).collate([0, 1], "seed")
    assert type(inputs) is tuple
    assert type(inputs[1]) is list
    assert type(targets) is dict


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), GeneratorExit()])
def test_what_means_something_to_an_event_loop_is_an_error_of_the_script_too(
    error: BaseException,
) -> None:
    class Fails(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise error
            return super().__getitem__(index)

    samples = CheckedDataset(Fails([(1.0, 2)] * 3))
    with pytest.raises(ScriptError, match=rf"data\[1\] failed: {type(error).__name__}"):
        samples.collate([0, 1], "seed")


def test_a_dataset_that_grows_or_shrinks_counts_as_it_was_at_first() -> None:
    data = [(1.0, 2)] * 3
    samples = CheckedDataset(data)
    data.append((1.0, 2))
    assert len(samples) == 3


class Pair(NamedTuple):
    first: Any
    second: Any


def test_named_tuples_keep_their_type_at_every_depth() -> None:
    sample = {"both": Pair(torch.ones(2), (1.0, Pair(2, 3)))}, Pair(4, 5)
    inputs, targets = CheckedDataset([sample] * 3).collate([0, 2], "seed")
    assert type(targets) is type(inputs["both"]) is type(inputs["both"].second[1]) is Pair
    assert type(inputs["both"].second) is tuple
    assert inputs["both"].first.shape == (2, 2)
    assert inputs["both"].second[1].second.tolist() == [3, 3]
    assert targets.second.tolist() == [5, 5]


def test_key_order_is_the_first_samples() -> None:
    data = [(OrderedDict(a=1.0, b=2.0), 0), (OrderedDict(b=4.0, a=3.0), 0)]
    inputs, _ = CheckedDataset(data).collate([0, 1], "seed")
    assert list(inputs) == ["a", "b"]
    assert inputs["a"].tolist() == [1.0, 3.0]


def test_leaves_describe_the_first_sample() -> None:
    leaves = CheckedDataset([({"x": torch.ones(2, 3)}, 1)]).leaves
    assert [(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves] == [
        ("input['x']", torch.float32, (2, 3)),
        ("target", torch.int64, ()),
    ]


X = torch.zeros(3)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ((torch.zeros(4), 0), r"data\[1\]: input is torch.float32 \[4\], but data\[0\] has"),
        ((X.double(), 0), r"data\[1\]: input is torch.float64 \[3\]"),
        ((X, 0.0), r"data\[1\]: target is torch.float64"),
        ((X, "cat"), r"data\[1\]: target cannot become a tensor: .* not a str"),
        ((X, 2**80), r"data\[1\]: target cannot become a tensor"),
        ((X, None), "not a NoneType"),
        ((X.to_sparse(), 0), r"only dense tensors on the CPU .* not a torch.sparse_coo tensor"),
        (((X, X), 0), r"other parts than data\[0\]: \['input\[0\]', 'input\[1\]', 'target'\]"),
        ({"x": X, "labels": 0}, r"has other parts than data\[0\]: .*input\['labels'\]"),
        ((X, 0, 0), r"must be a pair \(input, target\), or a dict .*, not a tuple of 3"),
        (X, r"must be a pair \(input, target\), or a dict .*, not a Tensor"),
    ],
)
def test_a_sample_unlike_the_first_is_named(odd: Any, told: str) -> None:
    samples = CheckedDataset([(X, 0), odd])
    with pytest.raises(ScriptError, match=told):
        samples.collate([0, 1], "seed")


def test_the_users_exception_keeps_its_place_and_cause() -> None:
    class Broken:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise FileNotFoundError("cat.png")
            return X, 0

    with pytest.raises(ScriptError, match=r"data\[7\] failed: FileNotFoundError: cat") as caught:
        CheckedDataset(Broken()).collate([6, 7], "seed")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_first_sample_that_is_unusable_is_reported_at_once() -> None:
    with pytest.raises(ScriptError, match=r"eval_data\[0\]"):
        CheckedDataset([("text", 1)], "eval_data")


class Noisy:
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.rand(2) + np.random.rand(), random.random()


def test_random_samples_repeat_with_the_seed_and_leave_the_global_state_alone() -> None:
    samples = CheckedDataset(Noisy())
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    first = samples.collate([0, 1, 2], "0 5")
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert same(first, samples.collate([0, 1, 2], "0 5"))
    assert not same(first, samples.collate([0, 1, 2], "0 6"))


def test_random_samples_do_not_depend_on_the_cut_into_micro_batches() -> None:
    samples = CheckedDataset(Noisy())
    whole = samples.collate([0, 1, 2, 3], "s")[0]
    pieces = samples.collate_pieces([[0, 1, 2], [3]], "s")
    assert torch.equal(whole, torch.cat([piece[0] for piece in pieces]))


class CountingLock:
    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *exception: object) -> None:
        pass


def test_slow_samples_give_the_lock_up_between_them_and_random_streams_run_on() -> None:
    ticks = iter(range(1000))
    lock = CountingLock()
    samples = CheckedDataset(Noisy(), lock=lock, clock=lambda: float(next(ticks)))
    slow = samples.collate([0, 1, 2], "s")
    assert lock.taken == 1 + 3
    assert same(slow, CheckedDataset(Noisy(), clock=lambda: 0.0).collate([0, 1, 2], "s"))


def test_fast_samples_take_the_lock_once() -> None:
    lock = CountingLock()
    CheckedDataset(Noisy(), lock=lock, clock=lambda: 0.0).collate([0, 1, 2, 3, 4], "s")
    assert lock.taken == 2


def test_pieces_are_read_when_they_are_asked_for() -> None:
    asked: list[int] = []

    class Watched:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            asked.append(index)
            return torch.ones(2) * index, index

    pieces = CheckedDataset(Watched()).collate_pieces([[1, 2], [3, 4]], "s")
    next(pieces)
    assert asked == [0, 1, 2]
    next(pieces)
    assert asked == [0, 1, 2, 3, 4]


def test_each_piece_lies_in_aligned_memory_of_its_own() -> None:
    """A slice of a larger tensor would start off the 64-byte grid, where kernels round apart."""
    samples = CheckedDataset([(torch.full((3,), float(i)), i) for i in range(10)])
    pieces = list(samples.collate_pieces([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], "s"))
    assert [tuple(x.shape) for x, _ in pieces] == [(4, 3), (4, 3), (2, 3)]
    assert [y.tolist() for _, y in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(x.data_ptr() % 64 == 0 for x, _ in pieces)


def test_samples_in_memory_that_the_next_one_overwrites_stay_what_they_were() -> None:
    class Reused:
        def __init__(self) -> None:
            self.memory = torch.empty(3)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return self.memory.fill_(index), index

    inputs, targets = CheckedDataset(Reused()).collate([2, 0, 3], "seed")
    assert inputs[:, 0].tolist() == targets.tolist() == [2, 0, 3]
