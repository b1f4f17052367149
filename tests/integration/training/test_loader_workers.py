"""Workers of a loader start once, and what they read is what new ones would in plain torch."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_layout import BatchLayout
from p2ptrain.holder.input.loader_pass import LoaderPass

SEED = 3

EPOCHS = 3

shared = numpy.random.default_rng(5)


class Noisy(Dataset[Any]):
    """Draws from every generator that torch seeds in a worker; also says who reads."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
        return torch.tensor([float(index), *drawn, *self.more()]), float(os.getpid())

    def more(self) -> list[float]:
        info = get_worker_info()
        return [0.0] if info is None else [info.id + info.seed % 1000 / 1000]


class Counting(Noisy):
    """What it gives hangs on what was read before."""

    def __init__(self) -> None:
        self.reads = 0

    def more(self) -> list[float]:
        self.reads += 1
        return [float(self.reads)]


class GlobalGenerator(Noisy):
    def more(self) -> list[float]:
        return [shared.random()]


class Opaque(Noisy):
    def __init__(self) -> None:
        self._numbers = iter(range(1000))

    def more(self) -> list[float]:
        return [float(next(self._numbers))]


class Shards(IterableDataset[Any]):
    """Workers end after differing numbers of samples."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in range(3 + 5 * info.id):
            yield torch.tensor([float(number), torch.rand(()).item()]), float(os.getpid())


class Split(Shards):
    """Divided by `worker_init_fn`, as torch's documentation does."""

    first, end = 0, 11

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.first, self.end):
            yield torch.tensor([float(number), torch.rand(()).item()]), float(os.getpid())


def seeds_numpy(worker: int) -> None:
    numpy.random.seed(torch.initial_seed() % 2**32 + worker)


def splits(worker: int) -> None:
    info: Any = get_worker_info()
    size = info.dataset.end - info.dataset.first
    each = -(-size // info.num_workers)
    info.dataset.first += worker * each
    info.dataset.end = min(info.dataset.first + each, info.dataset.end)


def loader(kind: str) -> DataLoader[Any]:
    more: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "prefetch_factor": 1}
    match kind:
        case "shuffled":
            return DataLoader(Noisy(), shuffle=True, **more)
        case "seeded":
            more |= {"worker_init_fn": seeds_numpy, "generator": torch.Generator()}
            return DataLoader(Noisy(), shuffle=True, **more)
        case "shards":
            return DataLoader(Shards(), **more)
        case "split":
            return DataLoader(Split(), worker_init_fn=splits, **more)
        case "kept":
            return DataLoader(Noisy(), shuffle=True, persistent_workers=True, **more)
    made = {"counting": Counting, "global": GlobalGenerator, "opaque": Opaque}
    return DataLoader(made[kind](), shuffle=True, **more)


ONCE = ["shuffled", "seeded", "shards", "kept"]

EACH_EPOCH = ["split", "counting", "global", "opaque"]


def passing(given: DataLoader[Any]) -> LoaderPass:
    layout = BatchLayout(own_loss=False)
    return LoaderPass(given, "data", layout, SEED, contextlib.nullcontext())


def plain(given: DataLoader[Any]) -> list[list[Tensor]]:
    """As the contract has it."""
    found = []
    for epoch in range(EPOCHS):
        torch.manual_seed(SEED + epoch)
        if given.generator is not None:
            given.generator.manual_seed(SEED + epoch)
        found.append([x for x, _ in given])
    return found


@pytest.mark.parametrize("kind", [*ONCE, *EACH_EPOCH])
def test_what_is_read_is_plain_torchs(kind: str) -> None:
    expected = plain(loader(kind))
    reading, processes = passing(loader(kind)), set[float]()
    for epoch in range(EPOCHS):
        batches = list(reading.epoch(epoch))
        assert len(batches) == len(expected[epoch])
        for ours, theirs in zip(batches, expected[epoch], strict=True):
            assert torch.equal(ours.input, theirs)
            processes |= set(ours.target.flatten().tolist())
    assert len(processes) == 2 if kind in ONCE else len(processes) > 2
    reading.close()
    assert not [one for one in processes if psutil.pid_exists(int(one))]


def test_a_pass_that_is_given_up_does_not_show_in_the_next() -> None:
    expected = plain(loader("shuffled"))
    reading = passing(loader("shuffled"))
    processes = set[float]()
    for epoch, taken in ((0, 1), (0, 4), (2, 0), (1, 9), (2, 9)):
        passed = reading.epoch(epoch)
        batches = [read for read, _ in zip(passed, range(taken), strict=False)]
        assert all(map(torch.equal, (one.input for one in batches), expected[epoch]))
        processes |= {pid for one in batches for pid in one.target.tolist()}
    assert len(processes) == 2
    reading.close()


def test_a_data_set_that_is_changed_here_is_read_as_it_is() -> None:
    given = Counting()
    reading = passing(DataLoader(given, batch_size=5, num_workers=1))
    next(iter(reading.epoch(0)))
    given.reads = 100
    (first, *_) = reading.epoch(1)
    assert first.input[0, -1] == 101
    reading.close()


class Fails(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("no such picture")
        return super().__getitem__(index)


def test_no_worker_is_left_after_an_error() -> None:
    reading = passing(DataLoader(Fails(), batch_size=2, num_workers=2))
    processes = set[float]()
    passed = reading.epoch(0)
    for _ in range(3):
        processes |= set(next(passed).target.tolist())
    with pytest.raises(ScriptError, match=r"batch 3 of epoch 1 failed: OSError: no such picture"):
        next(passed)
    assert len(processes) == 2
    assert not [one for one in processes if psutil.pid_exists(int(one))]
