"""What every batch of a loader must look like, read off the first ones.

Sizes that differ among the first batches (lengths padded to the longest, buckets) may differ in all
others too; those that vary together are one length, and the same wherever it stands in a batch.

A batch is taken apart into tensors with the samples in dimension 0; flags, None and text stay where
they are, and must be the same in every batch, since the model is captured with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.checked_dataset import (
    Collated,
    SampleLeaf,
    looks,
    other_parts,
    rebuild,
    walk,
)
from p2ptrain.job.batch_parts import shown, split_batch
from p2ptrain.job.rounds import MOST_LENGTHS
from p2ptrain.model.capture.scored_module import VaryingSize

SampleSizes: TypeAlias = tuple[tuple[int, ...], ...]
"""What a sample's tensors of a batch measure, in their order."""

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A batch as it was read: tensors of their own, contiguous, samples in dimension 0."""

    input: Collated
    target: Collated
    samples: int

    def rows(self, first: int, end: int) -> tuple[Collated, Collated]:
        """Samples [first, end)."""
        if first == 0 and end >= self.samples:
            return self.input, self.target
        cut = slice(first, end)
        return _cut(self.input, cut), _cut(self.target, cut)

    def chosen(self, indices: Sequence[int]) -> tuple[Collated, Collated]:
        """Those at `indices`."""
        wanted = torch.tensor(indices, dtype=torch.int64)
        return _cut(self.input, wanted), _cut(self.target, wanted)

    @property
    def leaves(self) -> list[Tensor]:
        """Its tensors: those of the input, then those of the target."""
        parts = (self.input,) if self.target is None else (self.input, self.target)
        found = (leaf for part in parts for _, leaf in walk("", part))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    @property
    def sizes(self) -> SampleSizes:
        """Of its tensors."""
        return tuple(tuple(leaf.shape[1:]) for leaf in self.leaves)

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(leaf.nbytes for leaf in self.leaves)


class NewSize(ScriptError):
    """The model is not captured for a size.

    Attributes:
        what: differs.
        batch: for whose it may be; None = it cannot be, as it was captured for others too.
    """

    def __init__(self, what: str, batch: ReadBatch | None) -> None:
        super().__init__(f"{what}: pad it to one size in collate_fn")
        self.what, self.batch = what, batch


class BatchLayout:
    """Reads batches that all look like the first ones.

    Args:
        own_loss: whether the model computes the loss itself, from the batch.
        as_tuple: whether an input that is such a list or tuple is passed as `model(*x)`.

    Attributes:
        leaves: tensors of the first batch.
        varying: lengths that differ from batch to batch; none before `settle`.
    """

    def __init__(
        self,
        *,
        own_loss: bool,
        as_tuple: Callable[[list[Any] | tuple[Any, ...]], bool] | None = None,
    ) -> None:
        self._own_loss = own_loss
        self._as_tuple = as_tuple
        self._example: tuple[Any, Any] | None = None
        self._first = ""  # what errors call the first batch
        self._constants: dict[str, object] = {}
        self._seen: list[dict[str, tuple[int, ...]]] = []
        self._lengths: dict[tuple[str, int], int] = {}  # place -> number of the length
        self._is_settled = False
        self.leaves: tuple[SampleLeaf, ...] = ()
        self.varying: tuple[VaryingSize, ...] = ()

    def settle(self, more: Iterable[SampleSizes] = ()) -> None:
        """What is the same in all batches so far must be so in all others.

        Args:
            more: of batches that came later, before the model was captured again.

        Raises:
            ScriptError: too many sizes vary, each for itself.
        """
        for sizes in more:
            paths = (leaf.path for leaf in self.leaves)
            self._seen.append(dict(zip(paths, sizes, strict=True)))
        found: dict[tuple[int, ...], list[tuple[int, str, int]]] = {}
        for index, leaf in enumerate(self.leaves):
            for dimension in range(len(leaf.shape)):
                column = tuple(shapes[leaf.path][dimension] for shapes in self._seen)
                if len(set(column)) > 1:
                    found.setdefault(column, []).append((index, leaf.path, dimension + 1))
        if len(found) > MOST_LENGTHS:
            names = ", ".join(f"dimension {p[0][2]} of {p[0][1]}" for p in found.values())
            raise ScriptError(
                f"{self._first}: more than {MOST_LENGTHS} sizes differ from batch to batch, each "
                f"for itself ({names}): pad some of them to one size in collate_fn"
            )
        self.varying = tuple(
            VaryingSize(
                tuple((index, dimension) for index, _, dimension in places),
                f"dimension {places[0][2]} of {places[0][1]}",
                tuple(sorted(set(column))),
            )
            for column, places in found.items()
        )
        self._lengths = {
            (path, dimension): number
            for number, places in enumerate(found.values())
            for _, path, dimension in places
        }
        self._is_settled = True
        self._seen.clear()

    def lengths(self, read: ReadBatch) -> tuple[int, ...]:
        """Of a batch."""
        return tuple(
            read.leaves[size.places[0][0]].shape[size.places[0][1]] for size in self.varying
        )

    def read(self, raw: Any, where: str) -> ReadBatch:
        """A batch as the loader gives it.

        Args:
            where: which one it is, for errors: "data: batch 3 of epoch 1".

        Raises:
            NewSize: a size differs that did not so far.
            ScriptError: it is none, or looks other than the first ones.
        """
        parts = split_batch(raw, own_loss=self._own_loss, name=where)
        given = parts.input
        if type(given) in (list, tuple) and self._as_tuple is not None:
            given = tuple(given) if self._as_tuple(given) else list(given)
        both = (given, parts.target)
        found = dict(self._taken_apart(both, where))
        constants = {path: leaf for path, leaf in found.items() if not isinstance(leaf, Tensor)}
        tensors = {path: leaf for path, leaf in found.items() if isinstance(leaf, Tensor)}
        samples = _samples(tensors, where)
        if self._example is None:
            self._example, self._constants, self._first = both, constants, where
            self.leaves = tuple(
                SampleLeaf(path, leaf.dtype, tuple(leaf.shape[1:]))
                for path, leaf in tensors.items()
            )
        self._check(tensors, constants, where)
        if not self._is_settled:
            self._seen.append({path: tuple(leaf.shape[1:]) for path, leaf in tensors.items()})
        leaves = {**constants, **{path: _owned(leaf) for path, leaf in tensors.items()}}
        ordered = iter([leaves[path] for path, _ in self._paths(self._example)])
        inputs = rebuild(self._example[0], ordered)
        target = None if self._example[1] is None else rebuild(self._example[1], ordered)
        batch = ReadBatch(inputs, target, samples)
        if self._is_settled:
            self._check_sizes(batch, where)
        return batch

    def _paths(self, both: tuple[Any, Any]) -> Iterator[tuple[str, Any]]:
        yield from walk("input", both[0])
        if both[1] is not None:
            yield from walk("target", both[1])

    def _taken_apart(self, both: tuple[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
        for path, leaf in self._paths(both):
            if isinstance(leaf, Tensor):
                if leaf.layout != torch.strided or leaf.is_nested or leaf.device.type != "cpu":
                    raise ScriptError(
                        f"{where}: {path} must be a dense tensor on the CPU, not a {leaf.layout} "
                        f"tensor on {leaf.device}"
                    )
                yield path, leaf.detach().as_subclass(Tensor)
            elif isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
                yield path, torch.as_tensor(leaf)
            elif isinstance(leaf, _CONSTANTS) and path.endswith("']"):
                yield path, leaf
            else:
                raise ScriptError(
                    f"{where}: {path} is {shown(leaf)}; a batch is made of tensors with the "
                    "samples in dimension 0: see what the loader's collate_fn gives"
                )

    def _check(
        self, tensors: Mapping[str, Tensor], constants: Mapping[str, object], where: str
    ) -> None:
        wanted = {leaf.path: leaf for leaf in self.leaves}
        if tensors.keys() != wanted.keys() or constants.keys() != self._constants.keys():
            every = [*wanted, *self._constants]
            raise other_parts(where, "the first batch", [*tensors, *constants], every)
        for path, leaf in wanted.items():
            tensor = tensors[path]
            if tensor.dtype != leaf.dtype or tensor.dim() != len(leaf.shape) + 1:
                found = SampleLeaf(path, tensor.dtype, tuple(tensor.shape[1:]))
                raise ScriptError(
                    f"{where}: {path} is {looks(found)} a sample, but the first batch has "
                    f"{looks(leaf)}; all batches must match"
                )
        for path, value in constants.items():
            if value != self._constants[path]:
                raise ScriptError(
                    f"{where}: {path} is {value!r}, and {self._constants[path]!r} in the first "
                    "batch; what is no tensor must be the same in every batch"
                )

    def _check_sizes(self, batch: ReadBatch, where: str) -> None:
        lengths: dict[int, tuple[str, int, int]] = {}
        for leaf, tensor in zip(self.leaves, batch.leaves, strict=True):
            for dimension, wanted in enumerate(leaf.shape, 1):
                has, path = tensor.shape[dimension], leaf.path
                number = self._lengths.get((path, dimension))
                if number is None and has != wanted:
                    raise NewSize(
                        f"{where}: dimension {dimension} of {path} has size {has}, and {wanted} in "
                        "all batches before",
                        batch,
                    )
                if number is None:
                    continue
                other, at, size = lengths.setdefault(number, (path, dimension, has))
                if has != size:
                    raise NewSize(
                        f"{where}: dimension {dimension} of {path} has size {has}, and dimension "
                        f"{at} of {other} {size}; in the batches before they were equal",
                        batch,
                    )


def _samples(tensors: Mapping[str, Tensor], where: str) -> int:
    sizes = {path: leaf.shape[0] if leaf.dim() else None for path, leaf in tensors.items()}
    if not sizes:
        raise ScriptError(f"{where} has no tensor in it")
    first_path, first = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size is None:
            raise ScriptError(
                f"{where}: {path} is a single number, not one for each sample: a batch is made of "
                "tensors with the samples in dimension 0"
            )
        if size != first:
            raise ScriptError(
                f"{where}: {first_path} has {first} samples, and {path} has {size}: dimension 0 "
                "of every tensor counts the samples"
            )
    if not first:
        raise ScriptError(f"{where} has no samples")
    return int(first or 0)


def _owned(leaf: Tensor) -> Tensor:
    """A copy: a loader may give the same memory every time, and a worker's is limited."""
    return leaf.clone(memory_format=torch.contiguous_format)


def _cut(value: Collated, chosen: slice | Tensor) -> Collated:
    if isinstance(value, Tensor):
        return value[chosen].contiguous()
    if isinstance(value, Mapping):
        return {key: _cut(item, chosen) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return rebuild(value, iter([_cut(leaf, chosen) for _, leaf in walk("", value)]))
    return value
