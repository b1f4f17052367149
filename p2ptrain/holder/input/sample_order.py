"""Which samples an update sees, in which order and with which weight.

    perm  = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
    batch = perm[s * batch_size:(s + 1) * batch_size]         the last incomplete one is dropped
    for q in batch.split(micro_batch): w = len(q) / len(batch)

Pure: the step number decides everything, so a job continues anywhere, on any set of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Where a step lies: both count from 0."""

    epoch: int
    step_in_epoch: int


@dataclass(frozen=True, slots=True)
class MicroBatchIndices:
    """One micro-batch of a batch.

    Attributes:
        indices: dataset indices, ascending positions of the batch.
        weight: its share of the batch; a ragged last micro-batch counts less.
    """

    indices: tuple[int, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of the samples of a whole job.

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

    def position(self, step: int) -> StepPosition:
        """Epoch and step within it of step `step`, counted from 0 over the whole job."""
        return StepPosition(*divmod(step, self.steps_per_epoch))

    def batch(self, step: int) -> tuple[int, ...]:
        """Dataset indices of step `step`'s batch: `batch_size` of them, in order."""
        position = self.position(step)
        permutation = _permutation(self.samples, self.seed + position.epoch)
        first = position.step_in_epoch * self.batch_size
        return tuple(permutation[first : first + self.batch_size].tolist())

    def splits(self, step: int, micro_batch: int) -> tuple[MicroBatchIndices, ...]:
        """Step `step`'s batch as micro-batches, in the order their gradients are added."""
        batch = self.batch(step)
        pieces = (batch[k : k + micro_batch] for k in range(0, len(batch), micro_batch))
        return tuple(MicroBatchIndices(piece, len(piece) / len(batch)) for piece in pieces)


@lru_cache(maxsize=2)
def _permutation(samples: int, seed: int) -> torch.Tensor:
    """int64, shape (samples,). Two are kept: the prefetcher is ahead across an epoch's border."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
