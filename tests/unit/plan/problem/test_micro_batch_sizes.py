"""Sizes of micro-batches, and windows of mini-batches over which stages deal."""

from __future__ import annotations

import pytest

from p2ptrain.plan.problem.candidates import MAX_WINDOW, even_window
from p2ptrain.plan.types.allocation import BatchSplit


@pytest.mark.parametrize(
    ("replicas", "window"),
    [((15, 1), 45), ((16,), 32), ((12, 3, 1), 36), ((40,), 40), ((5, 7), 35)],
)
def test_windows_are_even_and_not_shorter_than_usual(
    replicas: tuple[int, ...], window: int
) -> None:
    assert even_window(BatchSplit(32 * 8, 8), replicas) == BatchSplit(window * 8, 8)


def test_windows_too_long_to_simulate_stay_uneven() -> None:
    split = BatchSplit(32, 1)
    assert MAX_WINDOW < 17 * 19
    assert even_window(split, (17, 19)) is split
