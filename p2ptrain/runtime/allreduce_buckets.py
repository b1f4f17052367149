"""Buckets of gradients that a group sums together, and the steps of the ring. No IO.

Sums travel in buckets, so that those of the last layers are under way while the first layers'
gradients are still being computed (PyTorch DDP: Li et al., VLDB 2020, section 3.2). A bucket is cut
into one chunk a device, and each chunk goes round twice (ring all-reduce, Patarasuk and Yuan 2009).
In step s device i sends chunk i - s to device i + 1:

    chunk sent by each     sum up      hand on
    of 3 devices           0    1      2    3
    device 0               0    2      1    0
    device 1               1    0      2    1
    device 2               2    1      0    2

So every chunk is summed on one path and then copied: all devices end with the same bits. A device
sends 2 (g - 1) / g of the bucket's bytes, the minimum. Chunks may arrive in any order: a chunk is
sent on when it has arrived, and no other step depends on it.

Where values are rounded for the wire, the device that completes a chunk's sum rounds its own copy
before it sends it. Rounding twice changes nothing, so the bits stay the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from p2ptrain.model.wire.rounding import applies, round_trip_
from p2ptrain.model.wire.tensor_layout import WireFormat
from p2ptrain.plan.types.gradient_sums import USUAL

BucketSize: TypeAlias = Callable[[int, int], int]
"""Bytes in buckets, bytes that are in none yet -> bytes of the next one."""

MAX_ENTRIES = 4096
"""Most tensors in a bucket: a frame's header has one bit for each of them."""


@dataclass(frozen=True, slots=True)
class ReducedTensor:
    """A tensor that the devices of a group sum.

    Attributes:
        name: of the parameter whose gradient it is, or of the buffer.
        elements: how many.
    """

    name: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True, slots=True)
class BucketSlice:
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
class GradientBucket:
    """Tensors, or parts of large ones, that are summed together.

    Attributes:
        index: buckets start in this order, on every device of the group.
        entries: side by side, without gaps.
    """

    index: int
    dtype: torch.dtype
    entries: tuple[BucketSlice, ...]

    @property
    def elements(self) -> int:
        """How many."""
        last = self.entries[-1]
        return last.place + last.elements

    @property
    def names(self) -> frozenset[str]:
        """The tensors it waits for."""
        return frozenset(entry.name for entry in self.entries)


class BucketReadiness:
    """Which buckets' tensors are all final. Thread-safe."""

    def __init__(self, buckets: Sequence[GradientBucket], statistics: Collection[str]) -> None:
        """`statistics`: names that are final with the first gradient."""
        self._buckets = buckets
        self._statistics = statistics
        self._of_name: dict[str, list[int]] = {}
        for bucket in self._buckets:
            for name in bucket.names:
                self._of_name.setdefault(name, []).append(bucket.index)
        self._lock = threading.Lock()
        self._missing: list[set[str]] = []
        self._none_yet = True

    def reset(self) -> None:
        """Nothing is final."""
        with self._lock:
            self._missing = [set(bucket.names) for bucket in self._buckets]
            self._none_yet = True

    def final(self, name: str) -> bool:
        """One more is, and the statistics with the first; whether that made a bucket ready."""
        with self._lock:
            ready = [self._remove(statistic) for statistic in self._statistics if self._none_yet]
            self._none_yet = False
            return self._remove(name) or any(ready)

    def _remove(self, name: str) -> bool:
        ready = False
        for index in self._of_name.get(name, ()):
            if name in self._missing[index]:
                self._missing[index].remove(name)
                ready |= not self._missing[index]
        return ready

    def all_final(self) -> None:
        """Everything is."""
        with self._lock:
            for missing in self._missing:
                missing.clear()

    def ready(self, index: int) -> bool:
        """Whether that bucket may start."""
        return not self._missing[index]


def buckets_of(
    summands: Iterable[ReducedTensor], size_bytes: BucketSize = USUAL.next_bytes, *, first: int = 0
) -> tuple[GradientBucket, ...]:
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
    buckets: list[GradientBucket] = []
    filling: dict[torch.dtype, list[BucketSlice]] = {}

    def limit(dtype: torch.dtype) -> int:
        each = dtype.itemsize
        before = total[dtype] - left[dtype]
        return max(1, size_bytes(before * each, left[dtype] * each) // each)

    def finish(dtype: torch.dtype) -> None:
        buckets.append(GradientBucket(first + len(buckets), dtype, tuple(filling.pop(dtype))))
        left[dtype] -= buckets[-1].elements

    for summand in summands:
        done = 0
        while done < summand.elements:
            entries = filling.setdefault(summand.dtype, [])
            place = entries[-1].place + entries[-1].elements if entries else 0
            full = limit(summand.dtype)
            end = min(summand.elements, done + full - place)
            entries.append(BucketSlice(summand.name, done, end, place))
            done = end
            if place + entries[-1].elements == full or len(entries) == MAX_ENTRIES:
                finish(summand.dtype)
    for dtype in list(filling):
        finish(dtype)
    return tuple(buckets)


@dataclass(frozen=True, slots=True)
class RingPlace:
    """One device's place in a ring of `size` >= 2; it sends to place + 1 and receives from place -
    1."""

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


class BucketReduction:
    """A bucket that this device has begun.

    Args:
        flat: this device's part, 1-D; becomes the sum. Chunks of it are sent as they lie there, so
            nothing may write to it before all devices have the sum.
        present: a bit for each of the bucket's entries that has a value on this device.
        wire: how chunks travel.
    """

    def __init__(
        self, ring: RingPlace, flat: Tensor, present: int, wire: WireFormat = WireFormat.EXACT
    ) -> None:
        self.flat = flat
        self._wire = wire
        self._ring = ring
        self._present = [present] * ring.size
        self._received: set[int] = set()
        self._sent: set[int] = set()

    @property
    def present(self) -> int:
        """Once complete: a bit for each entry that has a value on any device."""
        return self._present[0]

    @property
    def complete(self) -> bool:
        """Whether everything has arrived and been handed to the link."""
        return len(self._received) == len(self._sent) == self._ring.steps

    def outgoing(self, step: int) -> tuple[int, Tensor]:
        """What to send in `step`: presence bits and elements of the chunk."""
        number = self._ring.sent(step)
        chunk = self._chunk(number)
        if not self._ring.sums(step):
            round_trip_(chunk, self._wire)
        return self._present[number], chunk

    def sent(self, step: int) -> None:
        """The chunk of that step was handed to the link."""
        self._sent.add(step)

    def has(self, step: int) -> bool:
        """Whether the chunk of that step has arrived."""
        return step in self._received

    def place(self, step: int) -> Tensor | None:
        """Where the chunk of that step may arrive; None = in memory of its own.

        A sum that is handed on replaces what this device sent for it, which therefore has arrived.
        """
        phase = self._ring.size - 1
        if self._ring.sums(step) or step - phase not in self._sent:
            return None
        chunk = self._chunk(self._ring.received(step))
        return None if applies(self._wire, chunk.dtype, chunk.numel()) else chunk

    def receive(self, step: int, present: int, values: Tensor) -> int | None:
        """A chunk has arrived, maybe in its `place`.

        Returns the step in which it is sent on, None = not at all.
        """
        number = self._ring.received(step)
        chunk = self._chunk(number)
        if self._ring.sums(step):
            chunk += values
            self._present[number] |= present
        else:
            if values.data_ptr() != chunk.data_ptr():
                chunk.copy_(values)
            self._present[number] = present
        self._received.add(step)
        return step + 1 if step + 1 < self._ring.steps else None

    def _chunk(self, number: int) -> Tensor:
        first, end = self._ring.chunk(number, self.flat.numel())
        return self.flat[first:end]


class SumsAbandoned(Exception):  # not an error: the round was given up
    """The sums are not wanted any more."""


class ArrivedSums:
    """The sums of one round. Thread-safe.

    Attributes:
        waited_seconds: for how long `wait` has kept its callers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: set[int] = set()
        self._is_given_up = False
        self.waited_seconds = 0.0

    def add(self, bucket: int) -> None:
        """That bucket's sum is in place."""
        with self._changed:
            self._there.add(bucket)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Every caller that waits now or later gets `SumsAbandoned`, unless what it waits for is
        there."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def wait(self, buckets: Collection[int]) -> frozenset[int]:
        """Wait until all of these are there; returns which are, these and others.

        Raises:
            GivenUp: they will not be.
        """
        began = perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_given_up or self._there.issuperset(buckets))
            self.waited_seconds += perf_counter() - began
            if not self._there.issuperset(buckets):
                raise SumsAbandoned
            return frozenset(self._there)
