"""What a group sums together and how it goes round: buckets of tensors, and the ring's steps.

Sums travel in buckets, so that those of the last layers are under way while the first layers'
gradients are still being computed (PyTorch DDP: Li et al., VLDB 2020, section 3.2). A bucket is cut
into one chunk a device, and each chunk goes round twice (ring all-reduce, Patarasuk and Yuan 2009):
first it is summed up, then the sum is handed on. In step s device i sends chunk i - s to device
i + 1, whatever the phase:

    chunk that each of 3 devices sends on to the next one

              sum up      hand on
    step      0    1      2    3
    device 0  0    2      1    0
    device 1  1    0      2    1
    device 2  2    1      0    2

So every chunk is summed on one path and then copied: all devices end with the same bits. A device
sends 2 (g - 1) / g of the bucket's bytes, the least that is possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from p2ptrain.plan.bucket_sizes import USUAL

BucketSize: TypeAlias = Callable[[int, int], int]
"""Bytes in buckets, bytes that are in none yet -> bytes of the next one."""

MAX_ENTRIES = 4096
"""Most tensors in a bucket: a frame's header has one bit for each of them."""


@dataclass(frozen=True, slots=True)
class Summand:
    """A tensor that the devices of a group sum.

    Attributes:
        name: of the parameter whose gradient it is, or of the buffer.
        elements: how many.
    """

    name: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Elements [first, end) of a tensor, which begin at `place` in their bucket."""

    name: str
    first: int
    end: int
    place: int

    @property
    def elements(self) -> int:
        """How many."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors, or parts of large ones, that are summed together.

    Attributes:
        index: buckets start in this order, on every device of the group.
        entries: side by side, without gaps.
    """

    index: int
    dtype: torch.dtype
    entries: tuple[Entry, ...]

    @property
    def elements(self) -> int:
        """How many."""
        last = self.entries[-1]
        return last.place + last.elements

    @property
    def names(self) -> frozenset[str]:
        """The tensors it waits for."""
        return frozenset(entry.name for entry in self.entries)


def buckets_of(
    summands: Iterable[Summand], size_bytes: BucketSize = USUAL.next_bytes, *, first: int = 0
) -> tuple[Bucket, ...]:
    """All tensors in buckets of one dtype each.

    Args:
        summands: in the order in which they become final; empty ones are left out.
        size_bytes: of the next bucket; larger tensors are cut.
        first: number of the first bucket.
    """
    summands = list(summands)
    total: Counter[torch.dtype] = Counter()  # elements
    for summand in summands:
        total[summand.dtype] += summand.elements
    left = total.copy()  # those that are in no finished bucket
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, list[Entry]] = {}

    def limit(dtype: torch.dtype) -> int:
        each = dtype.itemsize
        before = total[dtype] - left[dtype]
        return max(1, size_bytes(before * each, left[dtype] * each) // each)

    def finish(dtype: torch.dtype) -> None:
        buckets.append(Bucket(first + len(buckets), dtype, tuple(filling.pop(dtype))))
        left[dtype] -= buckets[-1].elements

    for summand in summands:
        done = 0
        while done < summand.elements:
            entries = filling.setdefault(summand.dtype, [])
            place = entries[-1].place + entries[-1].elements if entries else 0
            full = limit(summand.dtype)
            end = min(summand.elements, done + full - place)
            entries.append(Entry(summand.name, done, end, place))
            done = end
            if place + entries[-1].elements == full or len(entries) == MAX_ENTRIES:
                finish(summand.dtype)
    for dtype in list(filling):
        finish(dtype)
    return tuple(buckets)


@dataclass(frozen=True, slots=True)
class Ring:
    """One device's place in a ring of `size` >= 2; it sends to place + 1 and hears place - 1."""

    place: int
    size: int

    @property
    def steps(self) -> int:
        """Chunks that each device sends and receives for a bucket."""
        return 2 * (self.size - 1)

    def sums(self, step: int) -> bool:
        """Whether what arrives in this step is added; later ones replace."""
        return step < self.size - 1

    def sent(self, step: int) -> int:
        """The chunk sent in `step`: the one received in the step before."""
        return (self.place - step) % self.size

    def received(self, step: int) -> int:
        """The chunk received in `step`."""
        return (self.place - 1 - step) % self.size

    def chunk(self, number: int, elements: int) -> tuple[int, int]:
        """[first, end) of a chunk in a bucket; they differ by one element at most."""
        return number * elements // self.size, (number + 1) * elements // self.size
