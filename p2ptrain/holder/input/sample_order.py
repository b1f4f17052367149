"""Which samples an update sees, and in which order.

    perm  = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
    batch = perm[s * batch_size:(s + 1) * batch_size]         the last incomplete one is dropped

Pure: the step number decides everything, so a job continues anywhere, on any set of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


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
