"""The mini-batches that transformers' Trainer would go through, as a DataLoader of whole ones.

transformers takes `gradient_accumulation_steps` batches of `per_device_train_batch_size` for an
update; here they are one mini-batch, which p2ptrain divides as the household can. The order of the
samples is the same: accelerate seeds its generator with `seed + epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker


@dataclass(frozen=True, slots=True)
class TrainingLength:
    """How long a training is, counted as transformers counts.

    Attributes:
        samples: of one epoch; None where the data does not say.
        batches: of one epoch, of `per_device_train_batch_size` samples.
        updates: of one epoch, and `steps` in all.
        epochs: that are begun.
    """

    samples: int | None
    batches: int
    updates: int
    steps: int
    epochs: int

    def epoch_after(self, step: int, accumulated: int) -> float:
        """The epochs done after an update, from 1. `accumulated`: batches of an update."""
        epoch, update = divmod(step - 1, self.updates)
        return epoch + min((update + 1) * accumulated, self.batches) / self.batches

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is over after an update, or the training is."""
        return step % self.updates == 0 or step == self.steps


def length_of(args: TrainingArguments, samples: int | None) -> TrainingLength:
    """Of the training that `args` ask for.

    Args:
        samples: in one epoch, as far as the data says; then `max_steps` is given.
    """
    accumulated = args.gradient_accumulation_steps
    if samples is None:
        steps = args.max_steps
        return TrainingLength(None, steps * accumulated, steps, steps, steps)
    size = args.per_device_train_batch_size
    batches = samples // size if args.dataloader_drop_last else math.ceil(samples / size)
    updates = max(math.ceil(batches / accumulated), 1)
    if args.max_steps > 0:
        steps = args.max_steps
        return TrainingLength(samples, batches, updates, steps, math.ceil(steps / updates))
    steps = math.ceil(args.num_train_epochs * updates)
    return TrainingLength(samples, batches, updates, steps, math.ceil(args.num_train_epochs))


class SeededOrder(Sampler[int]):
    """As accelerate's SeedableRandomSampler in epoch e: a permutation drawn with `seed + e`.

    p2ptrain seeds torch's generator with the job's seed + e before epoch e, so e is known from that
    alone, whichever epochs were gone through before.

    Args:
        samples: how many there are; the first `taken` of an epoch's permutation are.
        shift: from the job's seed to that of the order: `data_seed - seed`.
    """

    def __init__(self, samples: int, taken: int, shift: int) -> None:
        self._samples = samples
        self._taken = taken
        self._shift = shift

    def __iter__(self) -> Iterator[int]:
        seed = torch.initial_seed() + self._shift
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(seed))
        return iter(order[: self._taken].tolist())

    def __len__(self) -> int:
        return self._taken


class FirstOf(Sampler[int]):
    """The first samples of another order."""

    def __init__(self, order: Sampler[int], taken: int) -> None:
        self._order = order
        self._taken = taken

    def __iter__(self) -> Iterator[int]:
        return iter([index for _, index in zip(range(self._taken), self._order, strict=False)])

    def __len__(self) -> int:
        return self._taken


def mini_batches(
    args: TrainingArguments,
    dataset: Any,
    sampler: Sampler[int] | None,
    collate: Callable[[list[Any]], Any],
) -> DataLoader[Any]:
    """A loader whose batches are the updates' samples.

    Args:
        sampler: as transformers' Trainer makes it; None for iterable datasets.
        collate: of one mini-batch.
    """
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    how: dict[str, Any] = {
        "batch_size": size,
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": args.dataloader_in_order,
        "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=0),
    }
    if isinstance(dataset, IterableDataset) or sampler is None:
        return DataLoader(dataset, **how)
    return DataLoader(dataset, sampler=_in_order(args, dataset, sampler), **how)


def _in_order(args: TrainingArguments, dataset: Sized, sampler: Sampler[int]) -> Sampler[int]:
    size, taken = args.per_device_train_batch_size, len(dataset)
    if args.dataloader_drop_last:  # what is left out is less than one batch, not one mini-batch
        taken -= taken % size
    if type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement:
        shift = 0 if args.data_seed is None else args.data_seed - args.seed
        return SeededOrder(len(dataset), taken, shift)
    return sampler if taken == len(dataset) else FirstOf(sampler, taken)
