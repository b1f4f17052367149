"""An evaluation leaves no rest that its model cannot compute."""

from __future__ import annotations

import pytest

from p2ptrain.job.rounds import RoundMode, RoundSequence


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
    course = RoundSequence(2, 2, 16, micro_batch, samples, least_evaluated=least)
    (evaluation,) = (r for r in course.rounds() if r.mode is RoundMode.EVAL)
    assert [evaluation.size(number) for number in evaluation.numbers] == sizes
    assert {r.micro_batch for r in course.rounds() if r.mode is RoundMode.TRAIN} == {micro_batch}
