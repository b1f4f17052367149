"""Reads and collates every micro-batch of every round ahead of training, in a thread of its own.

Micro-batches rather than batches, so that a large mini-batch of large samples is never in memory
at once; a bounded number of them. The user's dataset runs in its own thread so that decoding an
image stops neither the event loop nor the compute thread. One thread, because datasets need not be
thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from p2ptrain.aio.threads import run_in_background
from p2ptrain.holder.input.checked_dataset import CheckedDataset, Collated
from p2ptrain.holder.input.sample_order import SampleOrder, ordered_batches
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.logs import get_logger
from p2ptrain.messages.round_orders import LOADED_AHEAD
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice
from p2ptrain.model.capture.captured import Captured


@dataclass(frozen=True, slots=True)
class LoadedMicroBatch:
    """One piece, flattened for the wire, and its target as metrics take it."""

    feed: FeedItem
    target: Collated


class MicroBatchLoader:
    """Reads the pieces of given rounds in order."""

    def __init__(
        self,
        captured: Captured,
        data: CheckedDataset,
        order: SampleOrder,
        evaluation: CheckedDataset | None,
    ) -> None:
        self._captured = captured
        self._data = data
        self._order = order
        self._evaluation = evaluation

    async def pieces(self, rounds: Iterable[Round]) -> AsyncGenerator[LoadedMicroBatch, None]:
        """The pieces; raises ScriptError where the user's dataset fails.

        Close it (`aclosing`): else a call of the dataset may outlive its consumer.
        What memory does not hold is no ScriptError: see `memory_budget.is_out_of_memory`.
        """
        pieces = self._pieces(rounds)

        def load(_number: int) -> LoadedMicroBatch | None:
            return next(pieces, None)

        async with Prefetcher(load, _count(), ahead=LOADED_AHEAD) as loaded:
            async for piece in loaded:
                if piece is None:
                    return
                yield piece

    def now(self, rounds: Iterable[Round]) -> Iterator[LoadedMicroBatch]:
        """The same, each read when it is asked for: not for the event loop."""
        return self._pieces(rounds)

    def _pieces(self, rounds: Iterable[Round]) -> Iterator[LoadedMicroBatch]:
        for shape in rounds:
            indices = list(self._indices(shape))
            data = self._data if shape.mode is RoundMode.TRAIN else self._evaluation
            assert data is not None, "an evaluation round without eval_data"
            seed = f"{self._order.seed} {shape.mode} {shape.step}"
            pieces = data.collate_pieces(indices, seed)
            for number, (inputs, target) in zip(shape.numbers, pieces, strict=True):
                yield self._loaded(shape, number, (inputs, target))

    def _indices(self, shape: Round) -> Iterator[Sequence[int]]:
        if shape.mode is RoundMode.EVAL:
            yield from ordered_batches(shape.samples, shape.micro_batch)
        else:
            for split in self._order.splits(shape.step, shape.micro_batch):
                yield split.indices

    def _loaded(
        self, shape: Round, number: int, sample: tuple[Collated, Collated]
    ) -> LoadedMicroBatch:
        inputs: list[Tensor] = self._captured.entering(sample[0], shape.mode.value)
        targets: list[Tensor] = self._captured.flatten_target(sample[1])
        piece = MicroBatchSlice.whole(
            MicroBatchKey(shape.index, number), shape.mode, shape.size(number)
        )
        return LoadedMicroBatch(FeedItem(piece, inputs, targets), sample[1])


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


log = get_logger(__name__)

K = TypeVar("K")

V = TypeVar("V")

CLOSE_SECONDS = 1.0


class Prefetcher(Generic[K, V]):
    """Calls `load(key)` for each key in order, at most `ahead` results before they are taken.

    Use it as an async context manager and an async iterator, from one task. Leaving the context
    drops what was loaded and waits for the call that is running, if any, though not for long: a
    dataset may hang on a network drive.
    """

    def __init__(self, load: Callable[[K], V], keys: Iterable[K], *, ahead: int) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, not {ahead}")
        self._load = load
        self._ahead = ahead
        self._keys: Iterator[K] = iter(keys)
        self._waiting: deque[Future[V]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="p2ptrain-data")

    async def __aenter__(self) -> Prefetcher[K, V]:
        self._fill()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._drop()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await run_in_background(self._executor.shutdown)
        except TimeoutError:
            log.info("still_loading", after_seconds=CLOSE_SECONDS)

    def __aiter__(self) -> Prefetcher[K, V]:
        return self

    async def __anext__(self) -> V:
        """The next result, in the order of the keys; cancelling the wait loses none.

        Raises:
            ScriptError: what `load` raised for this key.
        """
        self._fill()
        if not self._waiting:
            raise StopAsyncIteration
        value = await asyncio.shield(asyncio.wrap_future(self._waiting[0]))
        self._waiting.popleft()
        self._fill()
        return value

    def _fill(self) -> None:
        while len(self._waiting) < self._ahead:
            try:
                key = next(self._keys)
            except StopIteration:
                return
            self._waiting.append(self._executor.submit(self._load, key))

    def _drop(self) -> None:
        while self._waiting:
            self._waiting.popleft().cancel()


@dataclass(frozen=True, slots=True)
class FeedItem:
    """One piece as the loader gives it: flattened tensors.

    Attributes:
        inputs: as `ModelDescription.crossing` lists them for boundary 0: what nothing uses stays.
        targets: all leaves.
    """

    piece: MicroBatchSlice
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
