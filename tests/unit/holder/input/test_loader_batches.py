"""What a loader gives is what plain torch has of it, however often and wherever it is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import p2ptrain
from p2ptrain.errors import ScriptError
from p2ptrain.holder.input import loader_memory
from p2ptrain.holder.input.batch_layout import BatchLayout
from p2ptrain.holder.input.loader_batches import LoaderBatches, LoaderEvaluation
from p2ptrain.holder.input.loader_memory import from_plain, to_plain
from p2ptrain.holder.input.loader_pass import LoaderPass, takes_parts
from p2ptrain.holder.input.loader_workers import end_workers
from p2ptrain.holder.input.mini_batches import first_samples
from p2ptrain.holder.input.open_data import open_data
from p2ptrain.job.job import Job
from p2ptrain.mesh.identity.state_folder import StateFolder

SEED = 11

DATA = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))


class Stream(IterableDataset[Any]):
    """Rows with noise of torch's generator."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            yield torch.rand(2), number


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2) + index, index


class Buckets(Sampler[list[int]]):
    """Batches of several sizes; says nothing of how many."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(11).tolist()
        yield from (order[:2], order[2:7], order[7:])


class OnceOnly:
    """An iterable that is empty from the second time on."""

    def __init__(self) -> None:
        self._rows = iter([(torch.ones(2, 2), torch.ones(2)), (torch.zeros(2, 2), torch.ones(2))])

    def __iter__(self) -> Iterator[Any]:
        return self._rows


class Stateful:
    """Says how far it is, as torchdata's StatefulDataLoader does; draws noise here."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "next": self._next, "name": b"x", 3: (None, 1.5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()  # as torch's own draws a seed
        loaded, self._loaded = self._loaded, None
        self._next = 0 if loaded is None else loaded["next"]
        self._order = torch.randperm(7) if loaded is None else loaded["order"]
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while self._next < 7:
            self.read += 1
            row = torch.rand(2, 3) + self._order[self._next]
            self._next += 1
            yield row, torch.zeros(2)


def drawing() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator())


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "dropped": lambda: DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True),
    "generator": drawing,
    "weighted": lambda: DataLoader(
        DATA, batch_size=4, sampler=WeightedRandomSampler([0.1, 0.9] * 5 + [0.5], 9)
    ),
    "replaced": lambda: DataLoader(
        DATA, batch_size=2, sampler=RandomSampler(DATA, replacement=True, num_samples=7)
    ),
    "buckets": lambda: DataLoader(DATA, batch_sampler=Buckets()),
    "batches": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=False)
    ),
    "own generator": lambda: DataLoader(
        DATA, batch_size=4, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(1))
    ),
    "noisy": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stateful": Stateful,
    "unbatched": lambda: DataLoader(
        [(torch.ones(3, 2) * k, torch.ones(3)) for k in range(4)], batch_size=None, shuffle=True
    ),
}


def plain(loader: Any, epochs: int) -> list[list[Any]]:
    """As the contract has it."""
    found = []
    for epoch in range(epochs):
        torch.manual_seed(SEED + epoch)
        if isinstance(getattr(loader, "generator", None), torch.Generator):
            loader.generator.manual_seed(SEED + epoch)
        found.append([*loader])  # and no `len`
    return found


def passing(loader: Any, *, own_loss: bool = False) -> LoaderPass:
    layout = BatchLayout(own_loss=own_loss)
    return LoaderPass(loader, "data", layout, SEED, threading.Lock())


def opened(loader: Any, epochs: int, kept_bytes: int = 1 << 20) -> LoaderBatches:
    made = LoaderBatches(passing(loader), epochs, kept_bytes=kept_bytes)
    made.layout.settle()
    return made


def inputs(batches: LoaderBatches, first_step: int = 0) -> list[Tensor]:
    return [next(b.pieces(100))[0] for b in batches.batches(first_step)]


def same(ours: list[Tensor], theirs: list[Any]) -> bool:
    pairs = zip(ours, (x for x, _ in theirs), strict=True)
    return all(torch.equal(mine, given) for mine, given in pairs)


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_plain_torch(name: str) -> None:
    expected = plain(LOADERS[name](), 3)
    batches = opened(LOADERS[name](), 3)
    torch.manual_seed(99)  # what else this process draws changes nothing
    assert same(inputs(batches), [batch for epoch in expected for batch in epoch])
    ends = [len(expected[0]), len(expected[0]) + len(expected[1])]
    assert [step for step in range(1, ends[1] + 1) if batches.ends_epoch(step)] == ends


@pytest.mark.parametrize("name", LOADERS)
def test_a_job_goes_on_with_the_same_batches(name: str) -> None:
    expected = [batch for epoch in plain(LOADERS[name](), 3) for batch in epoch]
    for first in (1, len(expected) // 2, len(expected) - 1, len(expected)):
        assert same(inputs(opened(LOADERS[name](), 3), first), expected[first:])


@pytest.mark.parametrize("name", LOADERS)
def test_batches_that_are_not_kept_are_read_again(name: str) -> None:
    expected = [batch for epoch in plain(LOADERS[name](), 3) for batch in epoch]
    batches = opened(LOADERS[name](), 3, kept_bytes=1)
    assert same(inputs(batches), expected)
    assert same(inputs(batches, 1), expected[1:])
    assert same(inputs(batches, len(expected) - 2), expected[-2:])


@pytest.mark.parametrize("place", range(1, 28))
def test_a_loader_that_says_its_place_goes_on_from_there(place: int) -> None:
    expected = [batch for epoch in plain(Stateful(), 4) for batch in epoch]
    batches = LoaderBatches(passing(Stateful()), 4, kept_bytes=1, places_share=math.inf)
    assert len(inputs(batches)) == 28
    noted = next(one for one in batches.places if one.step == place)
    written = json.loads(json.dumps([to_plain(noted.loader), to_plain(noted.streams)]))
    given = Stateful()
    later = opened(given, 4, kept_bytes=1)
    loader, streams = map(from_plain, written)
    later.recall([replace(noted, loader=loader, streams=streams)])
    before, step = given.read, min(place + 2, 27)
    assert same(inputs(later, step), expected[step:])
    assert given.read - before <= 28 - place
    assert later.epochs_before(28) == 4
    assert [end for end in range(1, 29) if later.ends_epoch(end)] == [7, 14, 21, 28]


async def test_its_place_is_written_down_for_the_next_process(tmp_path: Path) -> None:
    batches = LoaderBatches(passing(Stateful()), 4, kept_bytes=1 << 20, places_share=math.inf)
    folder = StateFolder(tmp_path)
    inputs(batches)
    seen = asyncio.Event()

    def steps() -> tuple[int, int]:
        if (tmp_path / loader_memory.PLACES_FILE).exists():
            seen.set()
        return 9, 20

    keeping = asyncio.create_task(loader_memory.keep(folder, "j", batches, steps, 0.0))
    await seen.wait()
    keeping.cancel()
    later = opened(Stateful(), 4)
    already = later.places
    loader_memory.recall(folder, "another", later)
    assert later.places == already
    loader_memory.recall(folder, "j", later)
    for step, found in zip((9, 20), later.places[:2], strict=True):
        written = loader_memory.newest_before(batches.places, step - 1)
        assert written is not None
        assert found.step == written.step
        assert torch.equal(found.loader["order"], written.loader["order"])
    loader_memory.forget(folder)
    assert not (tmp_path / loader_memory.PLACES_FILE).exists()


def test_kept_batches_are_not_asked_for_again() -> None:
    asked = 0

    class Counting(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal asked
            asked += 1
            return iter(Stream())

    batches = opened(DataLoader(Counting(), batch_size=4), 1)
    first = inputs(batches)
    assert same(first, [(x, 0) for x in inputs(batches)])
    assert asked == 1


def test_what_the_last_one_is_shows_before_it_is_used() -> None:
    shapes = [batch.shape for batch in opened(DataLoader(Stream(), batch_size=4), 2).batches(0)]
    assert [shape.samples for shape in shapes] == [4, 4, 2, 4, 4, 2]
    assert [shape.ends_epoch for shape in shapes] == [False, False, True] * 2
    assert [shape.is_last for shape in shapes] == [False] * 5 + [True]


def test_the_number_of_updates_is_known_where_the_loader_is_torchs_own() -> None:
    assert opened(LOADERS["shuffled"](), 3).steps == 9
    assert opened(LOADERS["buckets"](), 3).steps is None
    assert opened(LOADERS["stream"](), 3).steps is None


def test_an_iterable_that_can_be_read_once_ends_after_it() -> None:
    shapes = [batch.shape for batch in opened(OnceOnly(), 3).batches(0)]
    assert [shape.is_last for shape in shapes] == [False, True]


def test_micro_batches_are_slices_of_the_first_dimension() -> None:
    (first, *_) = opened(DataLoader(DATA, batch_size=5), 1).batches(0)
    pieces = list(first.pieces(2))
    assert [len(y) for _, y in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([x for x, _ in pieces]), DATA.tensors[0][:5])


def test_the_caller_may_reuse_the_memory_of_a_batch() -> None:
    class Reused:
        def __iter__(self) -> Iterator[Any]:
            x = torch.zeros(2, 3)
            for number in range(3):
                yield x.fill_(number), torch.zeros(2)

    assert [x[0, 0].item() for x in inputs(opened(Reused(), 1))] == [0, 1, 2]


def test_samples_of_the_first_batches_can_be_looked_at() -> None:
    batches = opened(DataLoader(DATA, batch_size=4), 2)
    looked_at = batches.looked_at()
    assert len(looked_at) == 8
    assert looked_at.collate([5, 4])[1].tolist() == [0, 2]
    assert first_samples(batches, 2, None)[1].tolist() == [8, 9, 10]
    assert first_samples(batches, 3, 3)[1].tolist() == [0, 1, 2]
    assert first_samples(batches, 6, 3)[1].tolist() == [0, 1, 2]  # there is none


def test_an_evaluation_is_read_again_each_time() -> None:
    evaluation = LoaderEvaluation(passing(DataLoader(Stream(), batch_size=4)))
    first, second = (list(evaluation.batches(step)) for step in (3, 6))
    assert [b.shape.is_last for b in first] == [False, False, True]
    assert same([next(b.pieces(9))[0] for b in first], [next(b.pieces(9)) for b in second])


class Fails(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("no such picture")
        return torch.zeros(2), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_raises_names_its_batch(workers: int) -> None:
    loader = DataLoader(Fails(), batch_size=3, num_workers=workers)
    sample = "" if workers else r" \(sample 7\)"
    words = rf"^data: batch 2 of epoch 1{sample} failed: OSError: no such picture.*\(at .*\)"
    with pytest.raises(ScriptError, match=words):
        inputs(opened(loader, 1))


@pytest.mark.timeout(20)
def test_a_worker_that_is_killed_with_torchs_lock_holds_nobody_up() -> None:
    """It looks every few seconds whether it shall end, and may be killed just then."""
    iterator: Any = iter(DataLoader(DATA, batch_size=2, num_workers=1))
    next(iterator)
    workers = list(iterator._workers)
    with iterator._workers_done_event._cond:
        end_workers(iterator)
    assert not any(worker.is_alive() for worker in workers)


def pairs(*batches: Any) -> Any:
    return list(batches) and DataLoader(list(batches), batch_size=None)


X, Y = torch.zeros(4, 3), torch.zeros(4)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader([]), "gives no batches: is the dataset empty"),  # type: ignore[arg-type]
        (DataLoader(DATA, batch_size=64, drop_last=True), "gives no batches"),
        (DataLoader(DATA, collate_fn=str), "batch 0 of epoch 1 must be a pair .* not a str"),
        (pairs((X, "words")), "target is a str; a batch is made of tensors"),
        (pairs(({"x": X, "words": ["a", "b"]}, Y)), r"input\['words'\]\[0\] is a str"),
        (pairs((X, Y[:3])), r"input has 4 samples, and target has 3: dimension 0"),
        (pairs((X, Y[0])), r"target is a single number, not one for each sample"),
        (pairs((X[:0], Y[:0])), r"has no samples"),
        (pairs((X.to_sparse(), Y)), "must be a dense tensor on the CPU, not a torch.sparse_coo"),
        (pairs((X, Y), (X.double(), Y)), "batch 1 of epoch 1: input is torch.float64"),
        (pairs((X, Y), ({"x": X}, Y)), "batch 1 of epoch 1 has other parts"),
        (pairs(({"x": X, "k": 1}, Y), ({"x": X, "k": 2}, Y)), r"input\['k'\] is 2, and 1 in the"),
    ],
)
def test_what_is_no_batch_is_named(loader: Any, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        inputs(opened(loader, 1))


def of_lengths(*lengths: int, extra: int = 0) -> Any:
    batches = [
        ({"x": torch.ones(2, n, 3), "mask": torch.ones(2, n)}, torch.ones(2, n + extra))
        for n in lengths
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def test_lengths_that_differ_together_are_one() -> None:
    batches = opened(of_lengths(4, 7, 5), 1)
    (size,) = batches.layout.varying
    assert size.places == ((0, 1), (1, 1), (2, 1))
    assert size.name == "dimension 1 of input['x']"
    assert size.seen == (4, 5, 7)
    assert [batch.shape.lengths for batch in batches.batches(0)] == [(4,), (7,), (5,)]


def test_a_length_that_only_shows_later_is_named() -> None:
    batches = opened(of_lengths(*[4] * 20, 5), 1)
    words = r"batch 20 of epoch 1: dimension 1 of input\['x'\] has size 5, and 4 in all .*: pad it"
    with pytest.raises(ScriptError, match=words):
        inputs(batches)


def test_lengths_that_were_equal_stay_so() -> None:
    loader = of_lengths(4, 7, *[5] * 20)
    loader.dataset[20] = ({"x": X[:2, None], "mask": torch.ones(2, 2)}, torch.ones(2, 2))
    words = r"mask'\] has size 2, and dimension 1 of input\['x'\] 1; in the batches before .* equal"
    with pytest.raises(ScriptError, match=words):
        inputs(opened(loader, 1))


def test_many_sizes_that_differ_each_for_itself_are_too_many() -> None:
    sizes = [[7 * k % n + 1 for k in range(1, 6)] for n in (8, 9, 10, 11, 12)]
    batches = [torch.ones(2, *(size[k] for size in sizes)) for k in range(5)]
    loader = DataLoader([(x, Y[:2]) for x in batches], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match=r"more than 4 sizes differ .* each for itself"):
        opened(loader, 1)


def test_the_structure_of_a_batch_is_kept() -> None:
    batch = {"x": {"a": X, "b": (X, X), "c": None}, "flag": True}
    layout = BatchLayout(own_loss=True)
    read = layout.read(batch, "batch 0")
    assert read.target is None
    given, _ = read.rows(1, 3)
    assert given["flag"] is True
    assert given["x"]["c"] is None
    assert given["x"]["b"][0].shape == (2, 3)


def test_a_dict_may_have_its_keys_in_another_order() -> None:
    layout = BatchLayout(own_loss=True)
    layout.read({"x": X, "y": Y}, "batch 0")
    assert list(layout.read({"y": Y, "x": X}, "batch 1").input) == ["x", "y"]


class Sockets(Dataset[Any]):
    """Whether a socket of the process that has opened it is still there."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        try:
            is_socket = stat.S_ISSOCK(os.fstat(self._number).st_mode)
        except OSError:
            is_socket = False
        return torch.tensor([float(is_socket)]), 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system lists no descriptors")
def test_workers_keep_no_connections_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        loader = DataLoader(Sockets(server.fileno()), batch_size=2, num_workers=1)
        assert [x.sum().item() for x in inputs(opened(loader, 1))] == [0.0, 0.0]


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


def test_lists_that_collation_has_made_of_tuples_are_passed_as_parts() -> None:
    assert takes_parts(Two())([X, X])
    assert not takes_parts(Two())([X, X, X])
    assert not takes_parts(nn.Linear(3, 1))([X])
    assert not takes_parts(nn.Linear(3, 1))([X, X])


class OneOrTwo(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, a: Any, b: Tensor | None = None) -> Tensor:
        return super().forward(sum(a) if b is None else a + b)


@pytest.mark.parametrize(("kind", "parts"), [(tuple, True), (list, False)])
def test_a_tuple_of_the_data_is_passed_as_parts_where_forward_takes_one_argument_too(
    kind: Any, parts: bool
) -> None:
    data = [(kind((torch.ones(3), torch.ones(3))), torch.ones(1)) for _ in range(4)]
    data: Any = [(kind((torch.ones(3), torch.ones(3))), torch.ones(1)) for _ in range(4)]
    loader = DataLoader(data, batch_size=2)
    job = Job(OneOrTwo(), loader, mse_loss, p2ptrain.SGD(lr=0.1))
    batch = open_data(job, contextlib.nullcontext()).batches.get(0)
    assert isinstance(batch.read.input, tuple) == parts
    assert loader.collate_fn is default_collate
