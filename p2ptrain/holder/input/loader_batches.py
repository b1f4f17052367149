"""Mini-batches of what can only be gone through: a `DataLoader`, an iterable dataset.

The very batches that plain torch would have:

    for epoch in range(epochs):
        torch.manual_seed(seed + epoch)                  and loader.generator, where it has one
        for batch in loader: ...

One batch is read ahead, since only the end of the loader shows which one is the last. Batches that
a recovery may need again are kept while memory lasts; what is older is reached by beginning again
and passing over the batches before it.
"""

from __future__ import annotations

import inspect
import os
import socket
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch.utils import data as torch_data

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_layout import BatchLayout, ReadBatch
from p2ptrain.holder.input.checked_dataset import Collated, SampleLeaf
from p2ptrain.holder.input.data_watch import DataWatch
from p2ptrain.holder.input.mini_batches import MiniBatch
from p2ptrain.holder.input.random_streams import RandomStreams
from p2ptrain.job.rounds import BatchShape
from p2ptrain.job.user_code import RAISED, describe_user_error, doings
from p2ptrain.process.memory_budget import is_out_of_memory, usable_memory_bytes

KEPT_BYTES = 512 << 20
"""Most that kept batches take."""

KEPT_SHARE = 0.1
"""Of free memory, for them."""

KEPT_LEAST = 4
"""Batches that are kept whatever they take: rounds under way need them."""

LOOKED_AT = 2
"""Batches of which samples are looked at before training."""

SIZES_LOOKED_AT = 16
"""Batches of which sizes are, while `LOOK_SECONDS` last."""

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LoaderBatch:
    """One batch of a loader.

    Attributes:
        place: its shape but for the lengths, which are known when the layout is settled.
    """

    place: BatchShape
    read: ReadBatch
    layout: BatchLayout

    @property
    def shape(self) -> BatchShape:
        return replace(self.place, lengths=self.layout.lengths(self.read))

    def pieces(self, micro_batch: int) -> Iterator[tuple[Collated, Collated]]:
        for first in range(0, self.read.samples, micro_batch):
            yield self.read.rows(first, min(first + micro_batch, self.read.samples))

    def sample_names(self) -> Sequence[int]:
        return range(self.read.samples)


class LoaderPass:
    """Goes through a loader, once an epoch.

    Args:
        loader: the user's, or made of the user's iterable dataset.
        name: how errors call it.
        seed: of the first epoch; that of epoch e is `seed + e`.
        lock: held while the user's code runs, which may draw random numbers.
    """

    def __init__(
        self,
        loader: Any,
        name: str,
        layout: BatchLayout,
        seed: int,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.name = name
        self.layout = layout
        self._loader = loader
        self._described = "the data" if name == "data" else name
        self._seed = seed
        self._lock = lock
        self._draws_here = not _draws_elsewhere(loader)
        self._first_states = [(one, one.get_state()) for one in _own_generators(loader)]

    @property
    def batch_size(self) -> int | None:
        """As the loader says."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def workers(self) -> int | None:
        """Processes that read; None where the loader is none of torch's."""
        found = getattr(self._loader, "num_workers", None)
        return found if isinstance(found, int) else None

    @property
    def last_batch(self) -> int | None:
        """Samples of the last batch of an epoch, where that is sure."""
        size = self.batch_size
        if self.batches is None or size is None:
            return None
        return size if self._loader.drop_last else len(self._loader.sampler) % size or size

    @property
    def batches(self) -> int | None:
        """In one epoch, where that is sure: torch's own samplers over a map-style dataset."""
        loader = self._loader
        if not isinstance(loader, torch_data.DataLoader) or not _has_own_samplers(loader):
            return None
        return len(loader)

    def epoch(self, epoch: int) -> Iterator[ReadBatch]:
        """The batches of one epoch, from 0.

        Raises:
            ScriptError: the loader raises, or gives what is no batch; names the batch.
        """
        streams, number = RandomStreams(self._seed + epoch), 0
        with self._user_code(f"batch 0 of epoch {epoch + 1}"), self._lock, streams.active():
            generator = getattr(self._loader, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self._seed + epoch)
            with _workers_without_sockets(self._loader):
                batches = iter(self._loader)
        while True:
            place = f"batch {number} of epoch {epoch + 1}"
            with self._user_code(place), self._drawing(streams):
                try:
                    raw = next(batches)
                except StopIteration:
                    return
            yield self.layout.read(raw, f"{self.name}: {place}")
            number += 1

    def begin_again(self) -> None:
        """Generators of the user's samplers are as they were at first."""
        for generator, state in self._first_states:
            generator.set_state(state)

    def close(self) -> None:
        """End workers that outlive an epoch."""
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None and hasattr(kept, "_shutdown_workers"):
            kept._shutdown_workers()
            self._loader._iterator = None

    @contextmanager
    def _drawing(self, streams: RandomStreams) -> Iterator[None]:
        """Workers draw from generators of their own, so their reads hold no lock."""
        if not self._draws_here:
            yield
            return
        with self._lock, streams.active():
            yield

    @contextmanager
    def _user_code(self, place: str) -> Iterator[None]:
        try:
            with doings.doing("reading {} of {}", place, self._described):
                yield
        except RAISED as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            sample = _failing_sample(error)
            which = place if sample is None else f"{place} (sample {sample})"
            raise ScriptError(f"{self.name}: {which} failed: {_described(error)}") from error


@contextmanager
def _workers_without_sockets(loader: Any) -> Iterator[None]:
    """Workers that start meanwhile close this process's connections, which they inherit.

    Else those would stay open after this process has died, and its port would stay taken.
    """
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        yield
        return
    given = loader.worker_init_fn
    loader.worker_init_fn = _WithoutSockets(given)
    try:
        yield
    finally:
        loader.worker_init_fn = given


class _WithoutSockets:
    """What a worker calls first; then the user's own."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self._given = given

    def __call__(self, worker: int) -> None:
        close_network_sockets()
        if self._given is not None:
            self._given(worker)


def close_network_sockets() -> None:
    """All of this process's own, where the system lists them."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=number)
            if found.family in (socket.AF_INET, socket.AF_INET6):
                found.close()
            else:
                found.detach()


def _draws_elsewhere(loader: Any) -> bool:
    """Whether nothing in this process draws random numbers between two batches."""
    if not isinstance(loader, torch_data.DataLoader) or not loader.num_workers:
        return False
    return isinstance(loader.dataset, torch_data.IterableDataset) or _has_own_samplers(loader)


_SAMPLERS = (
    torch_data.SequentialSampler,
    torch_data.RandomSampler,
    torch_data.WeightedRandomSampler,
    torch_data.SubsetRandomSampler,
)


def _has_own_samplers(loader: torch_data.DataLoader[Any]) -> bool:
    """Whether an epoch's order follows from its seed alone, and its length from `len`."""
    if isinstance(loader.dataset, torch_data.IterableDataset) or loader.batch_sampler is None:
        return False
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is not torch_data.BatchSampler or type(sampler) not in _SAMPLERS:
        return False
    return getattr(sampler, "generator", None) in (None, loader.generator)


def _own_generators(loader: Any) -> Iterator[torch.Generator]:
    """Of its samplers; they run on from epoch to epoch."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _failing_sample(error: BaseException) -> int | None:
    """Index of the sample that torch's loader was reading in this process."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith("data/_utils/fetch.py"):
            found = trace.tb_frame.f_locals.get("idx", found)
        trace = trace.tb_next
    return found if isinstance(found, int) else None


def _described(error: BaseException) -> str:
    """In one line, from a worker too: its message ends with the traceback there."""
    text = str(error)
    if "DataLoader worker process" not in text:
        return describe_user_error(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ") and "/torch/utils/" not in line]
    place = f" (at {places[-1]})" if places else ""
    return f"{lines[-1]}{place}, in a worker of the loader"


def takes_parts(module: nn.Module) -> Callable[[list[Any]], bool]:
    """Whether a list that torch's default collation has made of tuples is `model(*x)`.

    The collation makes lists of tuples. A `forward` that cannot be called with one argument, and
    can with so many, takes the parts.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return lambda _: False

    def fits(count: int) -> bool:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            return False
        return True

    return lambda parts: not fits(1) and fits(len(parts))


class LoaderBatches:
    """The mini-batches of training. Thread-safe; one thread reads at a time."""

    def __init__(self, loader: LoaderPass, epochs: int, *, kept_bytes: int | None = None) -> None:
        """Reads the first batches.

        Raises:
            ScriptError: there is none, or it is unusable.
        """
        self._loader = loader
        self.layout = loader.layout
        self._epochs = epochs
        self._known = loader.batches
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, LoaderBatch] = OrderedDict()
        self._ends: set[int] = set()  # numbers of updates that complete an epoch
        self._walk = self._all(0)
        self._position = 0  # of the next batch that the walk gives
        self._is_over = False
        self.steps = None if self._known is None else self._known * epochs
        if self.get(0) is None:
            raise ScriptError(
                f"{loader.name} gives no batches: is the dataset empty, or smaller than one batch "
                "with drop_last=True?"
            )
        sizes, until = [], monotonic() + LOOK_SECONDS
        for step in range(SIZES_LOOKED_AT):
            batch = self.get(step)
            if batch is None or (
                step >= LOOKED_AT and (monotonic() > until or 0 not in self._kept)
            ):
                break
            sizes.append(batch.read.samples)
        self.batch_size = loader.batch_size or max(sizes)
        self.fewest = min([*sizes, *([loader.last_batch] if loader.last_batch else [])])

    def batches(self, first_step: int) -> Iterator[MiniBatch]:
        step = first_step
        while (batch := self.get(step)) is not None:
            yield batch
            step += 1

    def ends_epoch(self, step: int) -> bool:
        if step not in self._ends:
            self.get(step - 1)
        return step in self._ends

    def epochs_before(self, step: int) -> int:
        if self._known:
            return step // self._known
        return sum(end <= step for end in tuple(self._ends))

    def batch(self, step: int) -> MiniBatch:
        batch = self.get(step)
        assert batch is not None, "a batch is read again that was never there"
        return batch

    def faster(self, watch: DataWatch, share: float) -> str:
        workers = self._loader.workers
        if workers is None:
            return "it is read in one process: torch's DataLoader has num_workers"
        advised = watch.workers(workers, share, os.cpu_count() or 1)
        if advised > workers:
            return f"num_workers={advised}"
        return f"its {workers} workers read no faster on this device"

    def close(self) -> None:
        if self._lock.acquire(blocking=False):  # else a read hangs, and nothing more is read
            try:
                self._walk.close()
            finally:
                self._lock.release()
        self._loader.close()

    def get(self, step: int) -> LoaderBatch | None:
        """That of update `step`; None after the last."""
        with self._lock:
            if step in self._kept:
                return self._kept[step]
            if step < self._position or (self._known and step - self._position > self._known):
                self._begin_again(step)
            while self._position <= step and not self._is_over:
                self._take()
            return self._kept.get(step)

    def _begin_again(self, step: int) -> None:
        """Where epochs do not hang on those before them, at that of `step`; else at the first."""
        self._walk.close()
        epoch = 0 if self._known is None else min(step // self._known, self._epochs)
        if not epoch:
            self._loader.begin_again()
        self._position = epoch * (self._known or 0)
        if self._position:
            self._ends.add(self._position)
        self._is_over = False
        self._walk = self._all(epoch)

    def _take(self) -> None:
        try:
            batch = next(self._walk, None)
        except BaseException:  # an iterator that has raised is over: what is read again begins
            self._begin_again(0)
            raise
        if batch is None:
            self._is_over = True
            return
        self._position += 1
        self._kept[batch.place.step] = batch
        if batch.place.ends_epoch:
            self._ends.add(self._position)
        self._drop_old()

    def _drop_old(self) -> None:
        most = self._kept_bytes
        if most is None:
            most = min(KEPT_BYTES, int(KEPT_SHARE * usable_memory_bytes()))
        total = sum(batch.read.nbytes for batch in self._kept.values())
        while total > most and len(self._kept) > KEPT_LEAST:
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.read.nbytes

    def _all(self, first_epoch: int) -> Generator[LoaderBatch, None, None]:
        """Every batch from an epoch on, each once it is known what comes after it."""
        step, before = first_epoch * (self._known or 0), None
        for epoch in range(first_epoch, self._epochs):
            is_first = True
            for read in self._loader.epoch(epoch):
                if before is not None:
                    yield self._batch(BatchShape(step, before.samples, is_first), before)
                    step += 1
                before, is_first = read, False
        if before is not None:
            shape = BatchShape(step, before.samples, ends_epoch=True, is_last=True)
            yield self._batch(shape, before)

    def _batch(self, place: BatchShape, read: ReadBatch) -> LoaderBatch:
        return LoaderBatch(place, read, self.layout)


class LoaderEvaluation:
    """The batches of an evaluation."""

    def __init__(self, loader: LoaderPass) -> None:
        """Reads the first batches, one after the other until `LOOK_SECONDS` are over."""
        self._loader = loader
        found, until = [], monotonic() + LOOK_SECONDS
        for read in loader.epoch(0):
            found.append(read)
            if monotonic() > until or len(found) == LOOKED_AT:
                break
        if not found:
            raise ScriptError(f"{loader.name} gives no batches: is the dataset empty?")
        self.first = found[0]
        self.samples = max(*(read.samples for read in found), loader.batch_size or 0)

    def batches(self, step: int) -> Iterator[MiniBatch]:
        before, layout = None, self._loader.layout
        for read in self._loader.epoch(0):
            if before is not None:
                yield LoaderBatch(BatchShape(step, before.samples), before, layout)
            before = read
        if before is not None:
            shape = BatchShape(step, before.samples, ends_epoch=True, is_last=True)
            yield LoaderBatch(shape, before, layout)

    def close(self) -> None:
        self._loader.close()


EXAMPLE = "example"
"""The seed of samples of which it does not matter which they are."""


class LookedAt:
    """Samples of a loader's first batches, as a `SampleReader` gives them; also which are where.

    Those of several batches at once, which may differ in their lengths, are taken from one of them.

    Args:
        get: the batch of an update; None = there is none.
    """

    def __init__(
        self, name: str, layout: BatchLayout, get: Callable[[int], ReadBatch | None]
    ) -> None:
        self.name = name
        self._layout = layout
        self._get = get
        found = [get(step) for step in range(LOOKED_AT)]
        batches = [read for read in found if read is not None]
        self._sizes = [read.samples for read in batches]
        self._usual = max(batches, key=lambda read: (read.samples > 1, read.nbytes / read.samples))

    @property
    def leaves(self) -> tuple[SampleLeaf, ...]:
        return self._layout.leaves

    def __len__(self) -> int:
        return sum(self._sizes)

    def collate(self, indices: Sequence[int], seed: str) -> tuple[Collated, Collated]:
        steps = [self._place(index) for index in indices]
        if len({step for step, _ in steps}) == 1 and seed != EXAMPLE:
            return self._read(steps[0][0]).chosen([row for _, row in steps])
        return self._usual.chosen([index % self._usual.samples for index in indices])

    def ready_pieces(self) -> Iterator[Sequence[int]]:
        return iter(())

    def batch(self, step: int) -> Sequence[int]:
        """Indices of that of update `step`."""
        read = self._get(step)
        if read is None:
            return self.batch(0)
        if step < len(self._sizes):
            first = sum(self._sizes[:step])
            return range(first, first + read.samples)
        return range(step << _STEP_BITS, (step << _STEP_BITS) + read.samples)

    def _place(self, index: int) -> tuple[int, int]:
        if index >> _STEP_BITS:
            return index >> _STEP_BITS, index & ((1 << _STEP_BITS) - 1)
        for step, size in enumerate(self._sizes):
            if index < size:
                return step, index
            index -= size
        raise IndexError(index)

    def _read(self, step: int) -> ReadBatch:
        read = self._get(step)
        assert read is not None, "there is no such batch"
        return read


_STEP_BITS = 32
"""Of an index, for the sample in its batch; beyond the first batches the rest is the step."""
