"""The sequence of rounds of a job, as its mini-batches come and without devices.

A round is either one update (`train`: all micro-batches of one mini-batch, then the update) or one
pass over `eval_data` (`eval`: forward only). Rounds are numbered from 0 and never reused, so a
frame is named by (generation, round, micro-batch).

    3 mini-batches an epoch, 2 epochs, eval_data given:

    round   0   1   2   3   4   5   6   7
    mode    t   t   t   e   t   t   t   e
    step    0   1   2   3   3   4   5   6      updates applied before the round
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count
from typing import Annotated, Generic, Protocol, TypeVar

from p2ptrain.net.forms import Count, Key, Length, Positive, Rare

MOST_LENGTHS = 4
"""Sizes, besides that of the batch, that may differ from batch to batch."""

LENGTHS_ROOM = 4
"""Times a length that may come is as long as the longest that the plan is made for."""

LENGTHS_SLACK = 1.5
"""Times a length that comes is as long as the longest planned for, without another plan."""


class RoundMode(StrEnum):
    """What a round does."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        index: number of the round, from 0.
        mode: train or eval.
        step: updates applied before this round.
        samples: samples in the round.
        micro_batch: samples of each micro-batch; the last may be smaller.
        first: number of its first micro-batch; where rounds do not wait for each other, those of
            training are numbered through, so that devices of a stage take them in turn.
        lengths: of its samples, where these differ from batch to batch.
    """

    index: Annotated[Count, Key("round")]
    mode: RoundMode
    step: Count
    samples: Positive
    micro_batch: Annotated[Positive, Key("size")]
    first: Annotated[Count, Key("number")] = 0
    lengths: Annotated[tuple[Count, ...], Length(MOST_LENGTHS), Rare()] = ()

    @property
    def numbers(self) -> range:
        """Of its micro-batches."""
        return range(self.first, self.first + self.micro_batches)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return math.ceil(self.samples / self.micro_batch)

    def size(self, number: int) -> int:
        """Samples of one micro-batch."""
        first = (number - self.first) * self.micro_batch
        return min(self.micro_batch, self.samples - first)


def samples_evaluated_together(micro_batch: int, samples: int, least: int) -> int:
    """Samples of a micro-batch of an evaluation.

    As in training, or the nearest that leaves no rest that is too small: smaller ones first.

    Args:
        samples: of the evaluation.
        least: the fewest that the model can be evaluated on together.
    """
    largest = min(micro_batch, samples)
    smaller = range(largest, least - 1, -1)
    larger = range(max(largest, least), samples)
    fits = (size for size in chain(smaller, larger) if not 0 < samples % size < least)
    return next(fits, samples)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What rounds need to know of one mini-batch, or of one batch of an evaluation.

    Attributes:
        step: updates before it.
        samples: in it.
        ends_epoch: an epoch, or the evaluation, is over after it.
        is_last: no other one follows.
        lengths: of its samples, where these differ from batch to batch.
    """

    step: int
    samples: int
    ends_epoch: bool = False
    is_last: bool = False
    lengths: tuple[int, ...] = ()


class HasShape(Protocol):
    """A batch."""

    @property
    def shape(self) -> BatchShape:
        """What rounds need to know of it."""


B = TypeVar("B", bound=HasShape)

B_co = TypeVar("B_co", bound=HasShape, covariant=True)


class MiniBatchOrder(Protocol[B_co]):
    """The mini-batches of a job; their number may be unknown until the last one is read."""

    def batches(self, first_step: int) -> Iterator[B_co]:
        """From that of update `first_step` on."""

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` updates complete an epoch; of those before the batches read so far."""


@dataclass(frozen=True, slots=True)
class PlannedRound(Generic[B]):
    """A round and its batch.

    Attributes:
        ends_epoch: of training: an epoch or the job is over after it; else the evaluation is.
        is_last: there is no other update after it.
    """

    round: Round
    batch: B
    ends_epoch: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class RoundSequence:
    """All rounds of a job.

    Attributes:
        steps: most updates in all; None = as many as the epochs give.
        micro_batch: samples.
        numbers_through: whether micro-batches of training are numbered through.
        least_evaluated: the fewest samples that the model can be evaluated on together.
    """

    steps: int | None
    micro_batch: int
    numbers_through: bool = False
    least_evaluated: int = 1

    def rounds(
        self,
        batches: MiniBatchOrder[B],
        evaluation: Callable[[int], Iterator[B]] | None,
        first_step: int = 0,
        evaluated: int = 0,
    ) -> Iterator[PlannedRound[B]]:
        """The rounds from update `first_step` on, numbered from 0.

        Args:
            batches: of training.
            evaluation: updates before it -> its batches; None = there is none.
            evaluated: evaluations after so many updates, and before, are left out.
        """
        numbers = count()
        first = 0
        is_over = self.steps is not None and first_step >= self.steps
        begun = first_step > evaluated and (is_over or batches.ends_epoch(first_step))
        if evaluation is not None and begun:
            yield from self._evaluation(evaluation, first_step, numbers)
        if is_over:
            return
        for batch in batches.batches(first_step):
            shape = batch.shape
            is_last = shape.is_last or shape.step + 1 == self.steps
            ends_epoch = shape.ends_epoch or is_last
            made = Round(
                *(next(numbers), RoundMode.TRAIN, shape.step, shape.samples, self.micro_batch),
                first=first,
                lengths=shape.lengths,
            )
            yield PlannedRound(made, batch, ends_epoch, is_last)
            if self.numbers_through:
                first += made.micro_batches
            if evaluation is not None and ends_epoch and shape.step + 1 > evaluated:
                yield from self._evaluation(evaluation, shape.step + 1, numbers)
            if is_last:
                return

    def _evaluation(
        self, evaluation: Callable[[int], Iterator[B]], step: int, numbers: Iterator[int]
    ) -> Iterator[PlannedRound[B]]:
        for batch in evaluation(step):
            samples, lengths = batch.shape.samples, batch.shape.lengths
            together = samples_evaluated_together(self.micro_batch, samples, self.least_evaluated)
            made = Round(next(numbers), RoundMode.EVAL, step, samples, together, lengths=lengths)
            yield PlannedRound(made, batch, batch.shape.is_last, is_last=False)
