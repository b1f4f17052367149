"""Mini-batches of what can only be gone through: a `DataLoader`, an iterable dataset.

One batch is read ahead, since only the end of the loader shows which one is the last. Batches that
a recovery may need again are kept while memory lasts; what is older is reached by beginning again
and passing over the batches before it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_layout import BatchLayout, ReadBatch
from p2ptrain.holder.input.checked_dataset import Collated, SampleLeaf
from p2ptrain.holder.input.data_watch import DataWatch
from p2ptrain.holder.input.loader_memory import LoaderPlace
from p2ptrain.holder.input.loader_pass import LoaderPass
from p2ptrain.holder.input.mini_batches import MiniBatch
from p2ptrain.job.rounds import BatchShape
from p2ptrain.process.memory_budget import usable_memory_bytes

KEPT_BYTES = 512 << 20
"""Most that kept batches take."""

KEPT_SHARE = 0.1
"""Of free memory, for them."""

KEPT_LEAST = 4
"""Batches that are kept whatever they take: rounds under way need them."""

LOOKED_AT = 2
"""Batches of which samples are looked at before training."""

SIZES_LOOKED_AT = 16
"""Batches of which sizes are, while `LOOK_SECONDS` last."""

LOOK_SECONDS = 1.0

PLACES = 64
"""Of a loader that says how far it is, that are kept."""

PLACES_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class LoaderBatch:
    """One batch of a loader.

    Attributes:
        place: its shape but for the lengths, which are known when the layout is settled.
    """

    place: BatchShape
    read: ReadBatch
    layout: BatchLayout

    @property
    def shape(self) -> BatchShape:
        return replace(self.place, lengths=self.layout.lengths(self.read))

    def pieces(self, micro_batch: int) -> Iterator[tuple[Collated, Collated]]:
        for first in range(0, self.read.samples, micro_batch):
            yield self.read.rows(first, min(first + micro_batch, self.read.samples))

    def sample_names(self) -> Sequence[str]:
        return [f"sample {row} of this step's batch" for row in range(self.read.samples)]


class LoaderBatches:
    """The mini-batches of training. Thread-safe; one thread reads at a time."""

    def __init__(
        self,
        loader: LoaderPass,
        epochs: int,
        *,
        kept_bytes: int | None = None,
        places_share: float = PLACES_SHARE,
    ) -> None:
        """Reads the first batches.

        Args:
            kept_bytes: most that kept batches take; None = a share of free memory.
            places_share: most of the time that goes into asking the loader how far it is.

        Raises:
            ScriptError: there is none, or it is unusable.
        """
        self._loader = loader
        self.layout = loader.layout
        self._epochs = epochs
        self._known = loader.batches
        self._skips = loader.are_epochs_alike
        self._kept_bytes = kept_bytes
        self._places_share = places_share
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, LoaderBatch] = OrderedDict()
        self._ends: set[int] = set()  # numbers of updates that complete an epoch
        self._places: deque[LoaderPlace] = deque(maxlen=PLACES)
        self._place_due = 0.0
        self._walk = self._all(0)
        self._position = 0  # of the next batch that the walk gives
        self._is_over = False
        self.steps = None if self._known is None else self._known * epochs
        if self.get(0) is None:
            raise ScriptError(
                f"{loader.name} gives no batches: is the dataset empty, or smaller than one batch "
                "with drop_last=True?"
            )
        sizes, until = [], monotonic() + LOOK_SECONDS
        for step in range(SIZES_LOOKED_AT):
            batch = self.get(step)
            if batch is None or (
                step >= LOOKED_AT and (monotonic() > until or 0 not in self._kept)
            ):
                break
            sizes.append(batch.read.samples)
        self.batch_size = loader.batch_size or max(*sizes, loader.largest)
        self.fewest = min([*sizes, *([loader.last_batch] if loader.last_batch else [])])

    def batches(self, first_step: int) -> Iterator[MiniBatch]:
        step = first_step
        while (batch := self.get(step)) is not None:
            yield batch
            step += 1

    def ends_epoch(self, step: int) -> bool:
        if step not in self._ends:
            self.get(step - 1)
        return step in self._ends

    def epochs_before(self, step: int) -> int:
        if self._known:
            return step // self._known
        return sum(end <= step for end in tuple(self._ends))

    def batch(self, step: int) -> MiniBatch:
        batch = self.get(step)
        assert batch is not None, "a batch is read again that was never there"
        return batch

    def faster(self, watch: DataWatch, share: float) -> str:
        workers = self._loader.workers
        if workers is None:
            return "it is read in one process: torch's DataLoader has num_workers"
        advised = watch.workers(workers, share, os.cpu_count() or 1)
        if advised > workers:
            return f"num_workers={advised}"
        return f"its {workers} workers read no faster on this device"

    def close(self) -> None:
        if self._lock.acquire(blocking=False):  # else a read hangs, and nothing more is read
            try:
                self._walk.close()
            finally:
                self._lock.release()
        self._loader.close()

    def get(self, step: int) -> LoaderBatch | None:
        """That of update `step`; None after the last."""
        with self._lock:
            if step in self._kept:
                return self._kept[step]
            is_far = self._skips and self._known and step - self._position > self._known
            knows_nearer = any(self._position + 1 < one.step <= step for one in self._places)
            if step < self._position or is_far or knows_nearer:
                self._begin_again(step)
            while self._position <= step and not self._is_over:
                self._take()
            return self._kept.get(step)

    def looked_at(self) -> LookedAt:
        """Samples of the first batches."""
        found = [batch for step in range(LOOKED_AT) if (batch := self.get(step)) is not None]
        return LookedAt(self._loader.name, self.layout, [batch.read for batch in found])

    @property
    def places(self) -> Sequence[LoaderPlace]:
        """From which it may go on, oldest first; none of a loader that does not say any."""
        return tuple(self._places)

    def recall(self, places: Sequence[LoaderPlace]) -> None:
        """Those of an earlier process, by which a read begins in the middle."""
        if self._loader.says_its_place:
            with self._lock:
                self._places.extendleft(reversed(places))

    def _begin_again(self, step: int) -> None:
        """Where the loader was closest before `step`, or an epoch begins that hangs on no other."""
        self._walk.close()
        epoch = min(step // self._known, self._epochs) if self._known and self._skips else 0
        first = epoch * (self._known or 0)
        before = [place for place in self._places if first < place.step <= step]
        place = max(before, key=lambda one: one.step, default=None)
        if place is not None:
            epoch, first = place.epoch, place.step
            self._ends.update(place.ends)
        elif not epoch:
            self._loader.begin_again()
        elif first:
            self._ends.add(first)
        self._position = first
        self._is_over = False
        self._walk = self._all(epoch, place)

    def _take(self) -> None:
        try:
            batch = next(self._walk, None)
        except BaseException:  # an iterator that has raised is over: what is read again begins
            self._begin_again(0)
            raise
        if batch is None:
            self._is_over = True
            return
        self._position += 1
        self._kept[batch.place.step] = batch
        if batch.place.ends_epoch:
            self._ends.add(self._position)
        self._drop_old()

    def _drop_old(self) -> None:
        most = self._kept_bytes
        if most is None:
            most = min(KEPT_BYTES, int(KEPT_SHARE * usable_memory_bytes()))
        total = sum(batch.read.nbytes for batch in self._kept.values())
        while total > most and len(self._kept) > KEPT_LEAST:
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.read.nbytes

    def _all(
        self, first_epoch: int, place: LoaderPlace | None = None
    ) -> Generator[LoaderBatch, None, None]:
        """Every batch from an epoch on, or from a place in it, once what comes next is known."""
        step = first_epoch * (self._known or 0) if place is None else place.step
        before = None
        for epoch in range(first_epoch, self._epochs):
            at = place if epoch == first_epoch else None
            is_first, first = at is None, 0 if at is None else at.number
            for number, read in enumerate(self._loader.epoch(epoch, at), first):
                if before is not None:
                    yield self._batch(BatchShape(step, before.samples, is_first), before)
                    step += 1
                before, is_first = read, False
                self._note_place(step + 1, epoch, number + 1)
            if at is not None and before is None:  # the place was behind the epoch's last batch
                self._ends.add(step)
        if before is not None:
            shape = BatchShape(step, before.samples, ends_epoch=True, is_last=True)
            yield self._batch(shape, before)

    def _note_place(self, step: int, epoch: int, number: int) -> None:
        """Of the batch that is read next, as often as that costs little."""
        since = monotonic()
        if since < self._place_due or not self._loader.says_its_place:
            return
        loader, streams = self._loader.place()
        ends = tuple(end for end in sorted(self._ends) if end < step)
        self._places.append(LoaderPlace(step, epoch, number, ends, loader, streams))
        now = monotonic()
        self._place_due = now + (now - since) / self._places_share

    def _batch(self, place: BatchShape, read: ReadBatch) -> LoaderBatch:
        return LoaderBatch(place, read, self.layout)


class LoaderEvaluation:
    """The batches of an evaluation."""

    def __init__(self, loader: LoaderPass) -> None:
        """Reads the first batches, one after the other until `LOOK_SECONDS` are over."""
        self._loader = loader
        found, until = [], monotonic() + LOOK_SECONDS
        for read in loader.epoch(0):
            found.append(read)
            if monotonic() > until or len(found) == LOOKED_AT:
                break
        if not found:
            raise ScriptError(f"{loader.name} gives no batches: is the dataset empty?")
        self.first = found[0]
        self.samples = max(*(read.samples for read in found), loader.batch_size or 0)

    def batches(self, step: int) -> Iterator[MiniBatch]:
        before, layout = None, self._loader.layout
        for read in self._loader.epoch(0):
            if before is not None:
                yield LoaderBatch(BatchShape(step, before.samples), before, layout)
            before = read
        if before is not None:
            shape = BatchShape(step, before.samples, ends_epoch=True, is_last=True)
            yield LoaderBatch(shape, before, layout)

    def close(self) -> None:
        self._loader.close()


class LookedAt:
    """Samples of a loader's first batches, as a `SampleReader` gives them.

    They may differ in their lengths, so those that are wanted are taken from one of the batches.
    """

    def __init__(self, name: str, layout: BatchLayout, batches: Sequence[ReadBatch]) -> None:
        self.name = name
        self._layout = layout
        self._count = sum(read.samples for read in batches)
        self._usual = max(batches, key=lambda read: (read.samples > 1, read.nbytes / read.samples))

    @property
    def leaves(self) -> tuple[SampleLeaf, ...]:
        return self._layout.leaves

    def __len__(self) -> int:
        return self._count

    def collate(self, indices: Sequence[int]) -> tuple[Collated, Collated]:
        many, wanted = self._usual.samples, len(indices)  # of few the halves are others still
        return self._usual.chosen([k * many // wanted for k in range(wanted)])

    def ready_pieces(self) -> Iterator[Sequence[int]]:
        return iter(())
