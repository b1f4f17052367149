"""Rounds as mini-batches come; an evaluation leaves no rest that its model cannot compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from p2ptrain.job.rounds import BatchShape, PlannedRound, RoundMode, RoundSequence


@dataclass(frozen=True)
class Batch:
    shape: BatchShape


class Epochs:
    """Mini-batches of given sizes, one list an epoch."""

    def __init__(self, *epochs: list[int]) -> None:
        self.all: list[Batch] = []
        self._ends = set[int]()
        for number, sizes in enumerate(epochs):
            for k, samples in enumerate(sizes):
                last = k == len(sizes) - 1
                shape = BatchShape(len(self.all), samples, last, last and number == len(epochs) - 1)
                self.all.append(Batch(shape))
            self._ends.add(len(self.all))

    def batches(self, first_step: int) -> Iterator[Batch]:
        return iter(self.all[first_step:])

    def ends_epoch(self, step: int) -> bool:
        return step in self._ends


def evaluation(*sizes: int) -> Iterator[Batch]:
    for number, samples in enumerate(sizes, 1):
        yield Batch(BatchShape(0, samples, is_last=number == len(sizes)))


def modes(rounds: Iterator[PlannedRound[Batch]]) -> str:
    return "".join(f"{r.round.mode.value[0]}{r.round.step}" for r in rounds)


DATA = Epochs([4, 4, 3], [4, 2])


def test_an_evaluation_follows_each_epoch() -> None:
    found = RoundSequence(None, 2).rounds(DATA, lambda _: evaluation(5))
    assert modes(found) == "t0t1t2e3t3t4e5"


def test_batches_are_as_large_as_the_data_gives_them() -> None:
    rounds = list(RoundSequence(None, 3).rounds(DATA, None))
    assert [(r.round.samples, r.round.micro_batches) for r in rounds] == [
        *((4, 2), (4, 2), (3, 1)),
        *((4, 2), (2, 1)),
    ]
    assert [r.is_last for r in rounds] == [False, False, False, False, True]


def test_fewer_steps_than_the_data_gives_end_the_job_there() -> None:
    found = list(RoundSequence(2, 2).rounds(DATA, lambda _: evaluation(5)))
    assert modes(iter(found)) == "t0t1e2"
    assert found[1].is_last
    assert found[1].ends_epoch


@pytest.mark.parametrize(
    ("first_step", "evaluated", "wanted"),
    [(3, 0, "e3t3t4e5"), (3, 3, "t3t4e5"), (4, 3, "t4e5"), (5, 3, "e5"), (5, 5, "")],
)
def test_a_job_goes_on_in_the_middle(first_step: int, evaluated: int, wanted: str) -> None:
    found = RoundSequence(None, 2).rounds(DATA, lambda _: evaluation(5), first_step, evaluated)
    assert modes(found) == wanted


def test_an_evaluation_of_several_batches_has_a_round_for_each() -> None:
    found = list(RoundSequence(3, 2).rounds(DATA, lambda _: evaluation(4, 4, 1)))
    assert [(r.round.samples, r.ends_epoch) for r in found[3:]] == [
        (4, False),
        (4, False),
        (1, True),
    ]
    assert [r.round.index for r in found] == list(range(6))


def test_micro_batches_are_numbered_through() -> None:
    found = RoundSequence(None, 2, numbers_through=True).rounds(DATA, None)
    assert [r.round.first for r in found] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("samples", "micro_batch", "least", "sizes"),
    [
        (9, 4, 1, [4, 4, 1]),
        (9, 4, 2, [3, 3, 3]),
        (10, 4, 2, [4, 4, 2]),
        (3, 4, 2, [3]),
        (1, 4, 2, [1]),
        (7, 2, 2, [4, 3]),
        (5, 2, 2, [3, 2]),
        (20, 8, 8, [10, 10]),
        (6, 4, 8, [6]),
        (21, 4, 8, [11, 10]),
    ],
)
def test_micro_batches_of_an_evaluation_are_large_enough(
    samples: int, micro_batch: int, least: int, sizes: list[int]
) -> None:
    rounds = RoundSequence(None, micro_batch, least_evaluated=least)
    found = [r.round for r in rounds.rounds(Epochs([16]), lambda _: evaluation(samples))]
    assert [found[1].size(number) for number in found[1].numbers] == sizes
    assert found[0].micro_batch == micro_batch
    assert found[1].mode is RoundMode.EVAL
