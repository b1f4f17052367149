"""The sequence of rounds of a job, computed beforehand and without devices.

A round is either one update (`train`: all micro-batches of one mini-batch, then the update) or one
pass over `eval_data` (`eval`: forward only). Rounds are numbered from 0 and never reused, so a
frame is named by (generation, round, micro-batch).

    steps_per_epoch = 3, epochs = 2, eval_data given:

    round   0   1   2   3   4   5   6   7
    mode    t   t   t   e   t   t   t   e
    step    0   1   2   3   3   4   5   6      updates applied before the round
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Annotated

from p2ptrain.net.forms import Count, Key, Positive


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
    """

    index: Annotated[Count, Key("round")]
    mode: RoundMode
    step: Count
    samples: Positive
    micro_batch: Annotated[Positive, Key("size")]
    first: Annotated[Count, Key("number")] = 0

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
class RoundSequence:
    """All rounds of a job.

    Attributes:
        steps_per_epoch: updates in one pass over the data.
        steps: updates in all (the smaller of `--steps` and epochs).
        batch_size, micro_batch: samples.
        eval_samples: size of `eval_data`, 0 for none.
        least_evaluated: the fewest samples that the model can be evaluated on together.
        numbers_through: whether micro-batches of training are numbered through.
    """

    steps_per_epoch: int
    steps: int
    batch_size: int
    micro_batch: int
    eval_samples: int
    numbers_through: bool = False
    least_evaluated: int = 1

    def rounds(self, first_step: int = 0, evaluated: int = 0) -> Iterator[Round]:
        """The rounds from update `first_step` on, numbered from 0.

        Args:
            evaluated: evaluations after so many updates, and before, are left out.
        """
        index = 0
        together = samples_evaluated_together(
            self.micro_batch, self.eval_samples, self.least_evaluated
        )
        for step in range(first_step, self.steps + 1):
            if self.eval_samples and step > evaluated and self.ends_epoch(step):
                yield Round(index, RoundMode.EVAL, step, self.eval_samples, together)
                index += 1
            if step < self.steps:
                shape = Round(index, RoundMode.TRAIN, step, self.batch_size, self.micro_batch)
                first = (step - first_step) * shape.micro_batches
                yield replace(shape, first=first) if self.numbers_through else shape
                index += 1

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` updates complete an epoch or the job."""
        return step % self.steps_per_epoch == 0 or step == self.steps
