"""Mini-batches of the user's data, whatever it is: a dataset, a `DataLoader`, a stream.

`BatchSource` is what the rest of the holder reads. Here it is made of a dataset, whose samples can
be read again in any order; `loader_batches` makes it of what can only be gone through.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.holder.input.checked_dataset import CheckedDataset, Collated, HasLeaves
from p2ptrain.holder.input.data_watch import DataWatch
from p2ptrain.holder.input.loader_pass import LoaderPlace
from p2ptrain.holder.input.sample_order import SampleOrder
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


class BatchSource(Protocol):
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

    @property
    def places(self) -> Sequence[LoaderPlace]:
        """From which a read may begin in the middle; none where nothing says any."""

    def recall(self, places: Sequence[LoaderPlace]) -> None:
        """Those of an earlier process."""

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

    def collate(self, indices: Sequence[int], seed: str) -> tuple[Collated, Collated]:
        """Those at `indices` as one batch."""

    def ready_pieces(self) -> Iterator[Sequence[int]]:
        """All indices, where reading them takes no time; else none."""


class FirstBatches(Protocol):
    """Which of a `SampleReader`'s samples stand in the first mini-batches."""

    def batch(self, step: int) -> Sequence[int]:
        """Indices of those of update `step`."""


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
        seed = batch_seed(self._order.seed, step)
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


def batch_seed(seed: int, step: int) -> str:
    """Of the random numbers that a dataset draws in the mini-batch of update `step`."""
    return f"{seed} {RoundMode.TRAIN} {step}"


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
