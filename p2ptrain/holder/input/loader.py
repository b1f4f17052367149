"""Reads and collates every micro-batch of every round ahead of training, in a thread of its own.

Micro-batches rather than batches, so that a large mini-batch of large samples is never in memory
at once; a bounded number of them. The user's dataset runs in its own thread so that decoding an
image stops neither the event loop nor the compute thread. One thread, because datasets need not be
thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import gt
from typing import TypeVar

import torch
from torch import Tensor

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_layout import NewSize
from p2ptrain.holder.input.checked_dataset import Collated
from p2ptrain.holder.input.micro_batch_weights import (
    Batch,
    BatchCount,
    MicroBatchWeights,
    Slices,
    weigh,
)
from p2ptrain.holder.input.mini_batches import (
    BatchSource,
    EvaluationSource,
    MiniBatch,
    too_few,
)
from p2ptrain.job.rounds import PlannedRound, Round, RoundMode, RoundSequence
from p2ptrain.logs import get_logger
from p2ptrain.messages.round_orders import LOADED_AHEAD
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice
from p2ptrain.model.capture.captured import Captured


class LongerThanPlanned(Exception):  # it is no error
    """A batch comes for which there must be another plan; `planned` is its round."""

    def __init__(self, planned: PlannedRound[MiniBatch]) -> None:
        super().__init__(f"lengths {planned.round.lengths}")
        self.planned = planned


@dataclass(frozen=True, slots=True)
class LoadedMicroBatch:
    """One piece, flattened for the wire, its round, and its target as metrics take it.

    Where the model computes the loss itself they take the batch.
    """

    planned: PlannedRound[MiniBatch]
    feed: FeedItem
    target: Collated


class MicroBatchLoader:
    """Reads the pieces of given rounds in order.

    Args:
        count: what weighs them in training; None = their samples do.
        slices: whose weights are wanted.
        least: the fewest samples of a micro-batch that the model is trained on.
        longest: lengths that the plan is made for; None = whatever comes is read.
    """

    def __init__(
        self,
        captured: Captured,
        data: BatchSource,
        evaluation: EvaluationSource | None,
        count: BatchCount | None = None,
        slices: Slices = lambda _number, size: [(0, size)],
        least: int = 1,
        longest: Sequence[int] | None = None,
    ) -> None:
        self._least, self._longest = least, longest
        self._count, self._slices = count, slices
        self._captured = captured
        self._data = data
        self._evaluation = evaluation

    def course(
        self, sequence: RoundSequence, first_step: int, evaluated: int
    ) -> AsyncGenerator[LoadedMicroBatch, None]:
        """The pieces of all rounds; raises ScriptError where the user's data fails.

        Raises LongerThanPlanned in place of a round that is.

        Close it (`aclosing`): else a call of the user's code may outlive its consumer.
        What memory does not hold is no ScriptError: see `memory_budget.is_out_of_memory`.
        """
        evaluation = None if self._evaluation is None else self._evaluation.batches
        planned = sequence.rounds(self._data, evaluation, first_step, evaluated)
        ahead = LOADED_AHEAD
        if self._count is not None:  # a mini-batch that is read whole is not waited for
            ahead += -(-self._data.batch_size // sequence.micro_batch)
        return read_ahead(self._pieces(planned), ahead)

    def pieces(self, rounds: Iterable[Round]) -> AsyncGenerator[LoadedMicroBatch, None]:
        """The pieces of rounds of training, once more; as `course`."""
        return read_ahead(self.now(rounds))

    def now(self, rounds: Iterable[Round]) -> Iterator[LoadedMicroBatch]:
        """The same, each read when it is asked for: not for the event loop."""
        return self._pieces(
            PlannedRound(shape, self._data.batch(shape.step), ends_epoch=False, is_last=False)
            for shape in rounds
        )

    def _pieces(self, rounds: Iterable[PlannedRound[MiniBatch]]) -> Iterator[LoadedMicroBatch]:
        for planned in rounds:
            shape, pieces = planned.round, planned.batch.pieces(planned.round.micro_batch)
            if self._longest is not None and any(map(gt, shape.lengths, self._longest)):
                raise LongerThanPlanned(planned)
            self._check_lengths(shape)
            if self._count is not None and shape.mode is RoundMode.TRAIN:
                yield from self._weighed(planned, list(pieces), self._count)
                continue
            if shape.mode is RoundMode.TRAIN:
                self._check_size(shape)
            for number, piece in zip(shape.numbers, pieces, strict=True):
                yield self._loaded(planned, number, piece)

    def _weighed(
        self, planned: PlannedRound[MiniBatch], pieces: Sequence[Batch], count: BatchCount
    ) -> Iterator[LoadedMicroBatch]:
        """What the whole mini-batch counts is known once all of it is read."""
        shape = planned.round
        slices = [self._slices(number, shape.size(number)) for number in shape.numbers]
        weights = weigh(count, pieces, slices)
        for number, piece, weight in zip(shape.numbers, pieces, weights, strict=True):
            yield self._loaded(planned, number, piece, weight)

    def _check_lengths(self, shape: Round) -> None:
        trains = shape.mode is RoundMode.TRAIN
        limits = self._captured.trains if trains else self._captured.evaluates
        if not limits.guards.are_met(shape.lengths):
            sizes = zip(self._captured.varying, shape.lengths, strict=True)
            raise NewSize(
                f"the {'mini-batch' if trains else 'evaluation'} after step {shape.step} has "
                f"{' and '.join(f'{size} in {one.name}' for one, size in sizes)}, and "
                "the model computes something else for that than for the batches before (an `if` "
                "of a size)",
                None,
            )

    def _check_size(self, shape: Round) -> None:
        last = shape.size(shape.numbers[-1])
        if last < self._least:
            what = f"the mini-batch of step {shape.step + 1}"
            raise ScriptError(too_few(what, shape.samples, last, self._least))

    def _loaded(
        self,
        planned: PlannedRound[MiniBatch],
        number: int,
        sample: Batch,
        weights: MicroBatchWeights | None = None,
    ) -> LoadedMicroBatch:
        shape = planned.round
        inputs: list[Tensor] = self._captured.entering(sample[0], shape.mode.value)
        targets: list[Tensor] = self._captured.targets(sample)
        piece = MicroBatchSlice.whole(
            MicroBatchKey(shape.index, number), shape.mode, shape.size(number), shape.lengths
        )
        target = sample[0] if sample[1] is None else sample[1]
        return LoadedMicroBatch(planned, FeedItem(piece, inputs, targets, weights), target)


log = get_logger(__name__)

V = TypeVar("V")

CLOSE_SECONDS = 1.0


async def read_ahead(source: Iterator[V], count: int = LOADED_AHEAD) -> AsyncGenerator[V, None]:
    """What `source` gives, with `count` results at most under way in a thread of its own.

    Close it (`aclosing`): that drops what was loaded and waits for the call that is running, if
    any, though not for long: a dataset may hang on a network drive.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="p2ptrain-data")
    waiting = deque(executor.submit(next, source, None) for _ in range(count))
    try:
        while (value := await asyncio.wrap_future(waiting[0])) is not None:
            waiting.popleft()
            waiting.append(executor.submit(next, source, None))
            yield value
    finally:
        for future in waiting:
            future.cancel()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await run_in_background(executor.shutdown)
        except TimeoutError:
            log.info("still_loading", after_seconds=CLOSE_SECONDS)


@dataclass(frozen=True, slots=True)
class FeedItem:
    """One piece as the loader gives it: flattened tensors.

    Attributes:
        inputs: as `ModelDescription.crossing` lists them for boundary 0: what nothing uses stays.
        targets: all leaves.
        weights: of its slices; None = of each its part of the mini-batch's samples.
    """

    piece: MicroBatchSlice
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    weights: MicroBatchWeights | None = None

    def weight_behind(self, first: int) -> list[Tensor]:
        """What follows the targets of the slice that begins there: its weight, where it has one."""
        if self.weights is None:
            return []
        return [torch.tensor([self.weights.by_first[first]], dtype=torch.float64)]
