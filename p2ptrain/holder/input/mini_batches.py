"""Mini-batches of the user's data, whatever it is: a dataset, a `DataLoader`, a stream.

`BatchSource` is what the rest of the holder reads. Here it is made of a dataset, whose samples can
be read again in any order; `loader_batches` makes it of what can only be gone through.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from p2ptrain.holder.input.checked_dataset import CheckedDataset, Collated, HasLeaves
from p2ptrain.holder.input.data_watch import DataWatch
from p2ptrain.holder.input.loader_memory import HasPlaces, LoaderPlace
from p2ptrain.job.rounds import BatchShape, RoundMode


class MiniBatch(Protocol):
    """The samples of one update, or of a part of an evaluation."""

    @property
    def shape(self) -> BatchShape:
        """How many samples, and what comes after them."""

    def pieces(self, micro_batch: int) -> Iterator[tuple[Collated, Collated]]:
        """(input, target) of its micro-batches, each read or cut when it is asked for.

        Raises:
            ScriptError: a sample cannot be read, or does not look like the others.
        """

    def sample_names(self) -> Sequence[str]:
        """Which sample of the data each one is; of a loader, which of its batch."""


class BatchSource(HasPlaces, Protocol):
    """The mini-batches of training. Read in a thread: batches come when the user's code is done."""

    @property
    def batch_size(self) -> int:
        """Samples of one, for plans; some may have fewer or more."""

    @property
    def fewest(self) -> int:
        """Samples of the smallest, of those that are known beforehand."""

    @property
    def steps(self) -> int | None:
        """Of all epochs; None = it is not known before the last is read."""

    def batches(self, first_step: int) -> Iterator[MiniBatch]:
        """From that of update `first_step` on."""

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` updates complete an epoch; of those before the batches read so far."""

    def epochs_before(self, step: int) -> int:
        """How many epochs `step` updates complete; of those before the batches read so far."""

    def batch(self, step: int) -> MiniBatch:
        """That of one update, once more."""

    def faster(self, watch: DataWatch, share: float) -> str:
        """What would make reading faster; `share` of the time is lost to it."""

    def close(self) -> None:
        """Nothing is read any more."""


class EvaluationSource(Protocol):
    """The batches of `eval_data`."""

    @property
    def samples(self) -> int:
        """Most of one batch, for plans."""

    def batches(self, step: int) -> Iterator[MiniBatch]:
        """All of the evaluation after `step` updates."""

    def close(self) -> None:
        """Nothing is read any more."""


class SampleReader(HasLeaves, Protocol):
    """Samples of the data to try things on, before training begins."""

    def __len__(self) -> int: ...

    def collate(self, indices: Sequence[int]) -> tuple[Collated, Collated]:
        """Those at `indices` as one batch."""

    def ready_pieces(self) -> Iterator[Sequence[int]]:
        """All indices, where reading them takes no time; else none."""


def first_samples(source: BatchSource, step: int, count: int | None) -> tuple[Collated, Collated]:
    """The first `count` samples (None = all) of update `step`, of the first one where none comes.

    Raises:
        ScriptError: one cannot be read, or does not look like the others.
    """
    batch = next(source.batches(step), None) or source.batch(0)
    return next(batch.pieces(count or batch.shape.samples))


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which samples an update sees, and in which order, for a whole job. Pure.

        perm  = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        batch = perm[s * batch_size:(s + 1) * batch_size]     the last incomplete one is dropped

    The step number decides everything, so a job continues anywhere, on any set of devices.

    Attributes:
        samples: length of the dataset, at least `batch_size`.
        batch_size: samples of one update.
        seed: the job's.
    """

    samples: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the data."""
        return self.samples // self.batch_size

    def batch(self, step: int) -> tuple[int, ...]:
        """Dataset indices of step `step`'s batch: `batch_size` of them, in order."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        permutation = _permutation(self.samples, self.seed + epoch)
        first = step_in_epoch * self.batch_size
        return tuple(permutation[first : first + self.batch_size].tolist())


@lru_cache(maxsize=2)
def _permutation(samples: int, seed: int) -> torch.Tensor:
    """int64, shape (samples,). Two are kept: the prefetcher is ahead across an epoch's border."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class IndexedBatch:
    """Samples of a dataset.

    Attributes:
        seed: of the random numbers that the dataset draws.
    """

    shape: BatchShape
    data: CheckedDataset
    indices: Sequence[int]
    seed: str

    def pieces(self, micro_batch: int) -> Iterator[tuple[Collated, Collated]]:
        starts = range(0, len(self.indices), micro_batch)
        parts = (self.indices[first : first + micro_batch] for first in starts)
        return self.data.collate_pieces(parts, self.seed)

    def sample_names(self) -> Sequence[str]:
        return [f"sample {index} of the data" for index in self.indices]


class IndexedBatches:
    """Those of a dataset, in an order that the step number decides."""

    def __init__(self, data: CheckedDataset, order: SampleOrder, epochs: int) -> None:
        self._data = data
        self._order = order
        self.batch_size = self.fewest = order.batch_size
        self.steps = epochs * order.steps_per_epoch

    def batches(self, first_step: int) -> Iterator[MiniBatch]:
        return map(self.batch, range(first_step, self.steps))

    def ends_epoch(self, step: int) -> bool:
        return step % self._order.steps_per_epoch == 0

    def epochs_before(self, step: int) -> int:
        return step // self._order.steps_per_epoch

    def batch(self, step: int) -> MiniBatch:
        shape = BatchShape(
            step, self.batch_size, self.ends_epoch(step + 1), is_last=step + 1 == self.steps
        )
        seed = f"{self._order.seed} {RoundMode.TRAIN} {step}"
        return IndexedBatch(shape, self._data, self._order.batch(step), seed)

    def faster(self, watch: DataWatch, share: float) -> str:
        workers = watch.workers(0, share, os.cpu_count() or 1)
        return (
            "read it in processes of its own, "
            f"data=DataLoader(dataset, batch_size={self.batch_size}, shuffle=True, "
            f"num_workers={workers})"
        )

    @property
    def places(self) -> Sequence[LoaderPlace]:
        return ()

    def recall(self, places: Sequence[LoaderPlace]) -> None:
        pass

    def close(self) -> None:
        pass


class IndexedEvaluation:
    """All samples of a dataset, as one batch."""

    def __init__(self, data: CheckedDataset, seed: int) -> None:
        self._data = data
        self._seed = seed
        self.samples = len(data)

    def batches(self, step: int) -> Iterator[MiniBatch]:
        shape = BatchShape(step, self.samples, ends_epoch=True, is_last=True)
        seed = f"{self._seed} {RoundMode.EVAL} {step}"
        yield IndexedBatch(shape, self._data, range(self.samples), seed)

    def close(self) -> None:
        pass


def too_few(what: str, samples: int, piece: int, least: int) -> str:
    """The message about a batch of which a micro-batch is too small for the model."""
    few = "one sample" if piece == 1 else f"{piece} samples"
    part = "" if piece == samples else f" and so a micro-batch of {few},"
    has = "one sample" if samples == 1 else f"{samples} samples"
    return (
        f"{what} has {has},{part} and the model needs at least {least} together (BatchNorm, for "
        "one, has no statistics of one): drop_last=True in the DataLoader, or another batch_size"
        f"{' or micro_batch' if part else ''}"
    )
