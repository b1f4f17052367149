"""The user's dataset behind checks: samples in, collated batches out.

Collation is torch.utils.data.default_collate's, except that tuples stay tuples (named ones keep
their type) and mappings become dicts, because the form of an input decides how the model is called.
All samples must have the same structure, shapes and dtypes: the captured graph is made for them.

A dataset may draw random numbers (augmentation). Each batch has its own streams, seeded by the
job's seed and the step, so that loading it again after a failure gives the same batch.

Datasets that are two tensors are read many samples at a time, because reading ready tensors one by
one costs a slow device a noticeable part of every round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.random_streams import RandomStreams
from p2ptrain.job.batch_parts import BatchParts, shown, split_batch
from p2ptrain.job.data_kinds import MapDataset
from p2ptrain.job.user_code import RAISED, READING, describe_user_error, doings
from p2ptrain.process.memory_budget import is_out_of_memory

Collated: TypeAlias = Any
"""A tensor (samples, ...), or tuples, lists and dicts of such tensors."""

_READY_PIECE = 256

_LOCK_SLICE_SECONDS = 0.005
"""Longest the lock is held, one sample aside: stages that draw dropout masks wait for it."""


@dataclass(frozen=True, slots=True)
class SampleLeaf:
    """One tensor of a sample: where it stands, and what every sample must have there."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckedDataset:
    """A dataset of pairs or dicts whose samples all look like the first one.

    Args:
        data: the user's dataset.
        name: how error messages call it.
        own_loss: whether the model computes the loss itself, from samples that are dicts.
        lock: held while the user's code runs, since it may use torch's global random generator,
            which the compute thread uses too.
        clock: seconds, monotonic.

    Raises:
        ScriptError: the first sample cannot be read or is no pair and no dict of (nested) numbers.
    """

    def __init__(
        self,
        data: MapDataset,
        name: str = "data",
        *,
        own_loss: bool = False,
        lock: AbstractContextManager[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data = data
        self.name = name
        self._own_loss = own_loss
        self._described = "the data" if name == "data" else name
        self._length = _length(data, name)
        self._lock = lock if lock is not None else threading.Lock()
        self._clock = clock
        with self._lock, RandomStreams(f"{name} example").active():
            self._example = self._read(0)
            self.leaves: Sequence[SampleLeaf] = tuple(
                _describe(*item) for item in self._flatten(0, self._example)
            )
        self._tensors = tensor_rows(data)

    def __len__(self) -> int:
        """Samples, as many as there were at first: the order of a job's samples hangs on it."""
        return self._length

    def ready_pieces(self) -> Iterator[Sequence[int]]:
        """All samples, piece by piece, where reading them takes no time; else none."""
        if self._tensors is not None:
            for first in range(0, len(self), _READY_PIECE):
                yield range(first, min(first + _READY_PIECE, len(self)))

    def collate(self, indices: Sequence[int], seed: str = "example") -> tuple[Collated, Collated]:
        """The samples at `indices` as one batch, each tensor in fresh contiguous memory.

        `seed` decides what random numbers the dataset draws.

        Raises:
            ScriptError: a sample cannot be read, or does not look like sample 0; names its index.
        """
        return next(self.collate_pieces([indices], seed))

    def collate_pieces(
        self, pieces: Iterable[Sequence[int]], seed: str
    ) -> Iterator[tuple[Collated, Collated]]:
        """Several batches, each made when it is asked for.

        The random streams run on from piece to piece, so the samples are the same however a batch
        is cut into micro-batches.
        """
        streams = RandomStreams(seed)
        for piece in pieces:
            try:
                batch = self._batch(piece, streams)
            except ScriptError as error:  # no fault of the script where memory was short
                if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                    raise
                raise MemoryError(str(error)) from error
            yield batch

    def _batch(self, indices: Sequence[int], streams: RandomStreams) -> tuple[Collated, Collated]:
        if self._tensors is not None:
            with suppress(IndexError):  # one by one it is said which sample is not there
                return self._tensors(indices)
        return self._stack(list(self._rows(indices, streams)))

    def _rows(self, indices: Sequence[int], streams: RandomStreams) -> Iterator[list[torch.Tensor]]:
        """One list of leaves a sample; the lock is given up between slices of time."""
        done = 0
        while done < len(indices):
            with self._lock, streams.active():
                slice_end = self._clock() + _LOCK_SLICE_SECONDS
                rows = [self._row(indices[done])]
                while done + len(rows) < len(indices) and self._clock() < slice_end:
                    rows.append(self._row(indices[done + len(rows)]))
            done += len(rows)
            yield from rows

    def _row(self, index: int) -> list[torch.Tensor]:
        found = dict(self._flatten(index, self._read(index)))
        paths = [leaf.path for leaf in self.leaves]
        if found.keys() != set(paths):
            raise other_parts(f"{self.name}[{index}]", self.name, found, paths)
        return [self._checked(index, leaf, found[leaf.path]) for leaf in self.leaves]

    def _checked(self, index: int, leaf: SampleLeaf, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != leaf.dtype or tuple(tensor.shape) != leaf.shape:
            found = looks(_describe(leaf.path, tensor))
            raise ScriptError(
                f"{self.name}[{index}]: {leaf.path} is {found}, "
                f"but {self.name}[0] has {looks(leaf)}; all samples must match"
            )
        return tensor.clone()  # a dataset may give the same memory for every sample

    def _stack(self, rows: list[list[torch.Tensor]]) -> tuple[Collated, Collated]:
        columns = iter([torch.stack(column) for column in zip(*rows, strict=True)])
        inputs, target = self._example
        made = rebuild(inputs, columns)
        return made, None if target is None else rebuild(target, columns)

    def _read(self, index: int) -> BatchParts:
        """Sample `index` as the user's code gives it."""
        try:
            with doings.doing(READING + " sample {} of {}", index, self._described):
                sample = self._data[index]
        except RAISED as error:
            raise ScriptError(
                f"{self.name}[{index}] failed: {describe_user_error(error)}"
            ) from error
        return split_batch(sample, own_loss=self._own_loss, name=f"{self.name}[{index}]")

    def _flatten(self, index: int, sample: tuple[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for part, value in zip(("input", "target"), sample, strict=True):
            if self._own_loss and part == "target":
                continue
            for path, leaf in walk(part, value):
                try:
                    yield path, _tensor(leaf)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise ScriptError(
                        f"{self.name}[{index}]: {path} cannot become a tensor: {error}"
                    ) from error


class HasLeaves(Protocol):
    """What samples look like."""

    name: str

    @property
    def leaves(self) -> Sequence[SampleLeaf]:
        """One for each tensor of a sample."""


def check_alike(these: HasLeaves, first: HasLeaves) -> None:
    """Raises ScriptError: these samples do not look like those that the model is made for."""
    ours, theirs = ({leaf.path: leaf for leaf in one.leaves} for one in (these, first))
    if ours.keys() != theirs.keys():
        raise other_parts(f"{these.name}[0]", first.name, ours, theirs)
    for path, leaf in ours.items():
        if leaf != theirs[path]:
            raise ScriptError(
                f"{these.name}[0]: {path} is {looks(leaf)}, but {first.name}[0] has "
                f"{looks(theirs[path])}; the model is made for samples that all match"
            )


def _length(data: MapDataset, name: str) -> int:
    try:
        return len(data)
    except Exception as error:
        raise ScriptError(f"len({name}) failed: {describe_user_error(error)}") from error


def walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf of nested tuples, lists and mappings."""
    if isinstance(value, Mapping):
        for key in value:
            yield from walk(f"{path}[{key!r}]", value[key])
    elif isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            yield from walk(f"{path}[{k}]", item)
    else:
        yield path, value


def rebuild(example: Any, columns: Iterator[torch.Tensor]) -> Collated:
    """`example`'s structure with one collated tensor for each leaf."""
    if isinstance(example, Mapping):
        return {key: rebuild(example[key], columns) for key in example}
    if isinstance(example, (tuple, list)):
        items = [rebuild(item, columns) for item in example]
        if hasattr(example, "_fields"):
            return type(example)(*items)
        return tuple(items) if isinstance(example, tuple) else items
    return next(columns)


def _tensor(leaf: object) -> torch.Tensor:
    """A leaf as default_collate would see it: Python floats are float64, integers int64."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_nested or leaf.device.type != "cpu":
            raise TypeError(
                "only dense tensors on the CPU are supported, not a "
                f"{leaf.layout} tensor on {leaf.device}"
            )
        return leaf.detach().as_subclass(torch.Tensor)
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return torch.as_tensor(leaf)
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    if isinstance(leaf, int):
        return torch.tensor(leaf)
    raise TypeError(f"expected a tensor, an array or a number, not {shown(leaf)}")


def _describe(path: str, tensor: torch.Tensor) -> SampleLeaf:
    return SampleLeaf(path, tensor.dtype, tuple(tensor.shape))


def other_parts(sample: str, name: str, found: Iterable[str], wanted: Iterable[str]) -> ScriptError:
    return ScriptError(
        f"{sample} has other parts than {name}[0]: {sorted(found)} instead of {sorted(wanted)}"
    )


def looks(leaf: SampleLeaf) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}"


TensorRows: TypeAlias = Callable[[Sequence[int]], tuple[Tensor, Tensor]]
"""Indices -> inputs and targets, each (samples, ...) in fresh contiguous memory."""


def tensor_rows(data: Any) -> TensorRows | None:
    """How to read a `TensorDataset` of inputs and targets, or a `Subset` of one, in one go.

    The bits are those of the samples read one by one and stacked; it raises IndexError where there
    is no such sample. None for every other dataset, a class derived from these too: what it does
    with a sample is its own.
    """
    if type(data) is Subset:
        whole, chosen = tensor_rows(data.dataset), data.indices
        if whole is None:
            return None
        return lambda indices: whole([int(chosen[index]) for index in indices])
    if type(data) is not TensorDataset or len(data.tensors) != 2:
        return None
    inputs, targets = data.tensors
    if not all(type(one) is Tensor and _is_plain(one) for one in (inputs, targets)):
        return None
    return lambda indices: (_rows(inputs, indices), _rows(targets, indices))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"


def _rows(tensor: Tensor, indices: Sequence[int]) -> Tensor:
    wanted = torch.tensor(indices, dtype=torch.int64)
    wanted[wanted < 0] += len(tensor)  # a `Subset` may count from the end
    return tensor.detach().index_select(0, wanted).contiguous()
