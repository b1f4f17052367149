"""One pass through what can only be gone through: the very batches that plain torch would have.

for epoch in range(epochs):
    torch.manual_seed(seed + epoch)                  and loader.generator, where it has one
    for batch in loader: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import data as torch_data

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_layout import BatchLayout, ReadBatch
from p2ptrain.holder.input.loader_memory import LoaderPlace
from p2ptrain.holder.input.loader_workers import LoaderWorkers, close_network_sockets, end_workers
from p2ptrain.holder.input.random_streams import RandomStreams, States
from p2ptrain.job.user_code import RAISED, READING, describe_user_error, doings
from p2ptrain.process.memory_budget import is_out_of_memory


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
        self._streams: RandomStreams | None = None  # of the newest pass
        self._workers = LoaderWorkers.of(loader)
        self._draws_here = self._workers is None and not _draws_elsewhere(loader)
        self._first_states = [(one, one.get_state()) for one in _own_generators(loader)]

    @property
    def batch_size(self) -> int | None:
        """As the loader says."""
        size = getattr(self._loader, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def largest(self) -> int:
        """Samples of the largest batch, where all are listed; else 0."""
        listed = getattr(self._loader, "batch_sampler", None)
        return max(map(len, listed), default=0) if isinstance(listed, list | tuple) else 0

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
    def are_epochs_alike(self) -> bool:
        """Whether an epoch follows from its seed alone, so that one may begin with any."""
        return self.batches is not None and not self._loader.persistent_workers

    @property
    def batches(self) -> int | None:
        """In one epoch, where that is sure: torch's own samplers over a map-style dataset."""
        loader = self._loader
        if not isinstance(loader, torch_data.DataLoader) or not _has_own_samplers(loader):
            return None
        return len(loader)

    @property
    def says_its_place(self) -> bool:
        """Whether it can go on in the middle of an epoch."""
        asked = (getattr(self._loader, name, None) for name in ("state_dict", "load_state_dict"))
        return all(callable(one) for one in asked) and not isinstance(self._loader, nn.Module)

    def place(self) -> tuple[Any, States]:
        """Of the pass that gives batches now: the loader's, and that of its random streams.

        Raises:
            ScriptError: the loader raises.
        """
        assert self._streams is not None
        with self._user_code("the state_dict"), _drawing(self._lock, self._streams):
            state = self._loader.state_dict()
        assert self._streams.states is not None
        return state, self._streams.states

    def epoch(self, epoch: int, place: LoaderPlace | None = None) -> Iterator[ReadBatch]:
        """The batches of one epoch, from 0.

        Args:
            place: from where on; None = from its beginning.

        Raises:
            ScriptError: the loader raises, or gives what is no batch; names the batch.
        """
        streams, number = RandomStreams(self._seed + epoch), 0 if place is None else place.number
        self._streams = streams
        drawing = partial(_drawing, self._lock, streams)
        reading = drawing if self._draws_here else nullcontext
        with self._user_code(f"batch 0 of epoch {epoch + 1}"):
            with drawing():
                generator = getattr(self._loader, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(self._seed + epoch)
                if place is not None:
                    self._loader.load_state_dict(place.loader)
            if self._workers is not None:
                batches = self._workers.epoch(drawing)
            else:
                with drawing(), _workers_without_sockets(self._loader):
                    batches = iter(self._loader)
            if place is not None:
                streams.go_on(place.streams)
        while True:
            name = f"batch {number} of epoch {epoch + 1}"
            with self._user_code(name), reading():
                try:
                    raw = next(batches)
                except StopIteration:
                    return
            yield self.layout.read(raw, f"{self.name}: {name}")
            number += 1

    def begin_again(self) -> None:
        """Generators of the user's samplers, and workers that stay, are as they were at first."""
        if self._workers is None:
            self.close()
        for generator, state in self._first_states:
            generator.set_state(state)

    def close(self) -> None:
        """End workers that outlive an epoch."""
        if self._workers is not None:
            self._workers.close()
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None:
            end_workers(kept)
            self._loader._iterator = None

    @contextmanager
    def _user_code(self, place: str) -> Iterator[None]:
        try:
            with doings.doing(READING + " {} of {}", place, self._described):
                yield
        except RAISED as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            sample = _failing_sample(error)
            which = place if sample is None else f"{place} (sample {sample})"
            raise ScriptError(f"{self.name}: {which} failed: {_described(error)}") from error


@contextmanager
def _drawing(lock: AbstractContextManager[Any], streams: RandomStreams) -> Iterator[None]:
    with lock, streams.active():
        yield


@contextmanager
def _workers_without_sockets(loader: Any) -> Iterator[None]:
    """Workers that torch starts meanwhile close this process's connections first."""
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


def takes_parts(module: nn.Module) -> Callable[[Sequence[Any]], bool]:
    """Whether an input of several parts in a batch of torch's default collation is `model(*x)`.

    A tuple is, of a `forward` that can be called with so many arguments; a list only if that cannot
    be called with one.
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

    return lambda parts: fits(len(parts)) and (isinstance(parts, tuple) or not fits(1))
