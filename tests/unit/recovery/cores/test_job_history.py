"""Once each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import InternalError
from p2ptrain.recovery.cores.job_history import ReportedProgress, ReportOnce


def test_a_replayed_step_is_no_news() -> None:
    once = ReportOnce(ReportedProgress(4, 3))
    assert [once.step(step) for step in (3, 4, 5, 5, 6)] == [False, False, True, False, True]
    assert [once.eval(step) for step in (3, 6, 6)] == [False, True, False]
    assert once.reported == ReportedProgress(6, 6)


def test_a_hole_is_a_bug() -> None:
    with pytest.raises(InternalError, match="step 6 is done, but 4 was the last"):
        ReportOnce(ReportedProgress(4)).step(6)


def test_what_a_power_cut_has_lost_is_no_hole() -> None:
    once = ReportOnce(ReportedProgress(4, 3))
    assert once.goes_on_from(7) == 3
    assert [once.step(step) for step in (7, 8)] == [False, True]
    assert once.goes_on_from(6) == 0
    assert once.reported == ReportedProgress(8, 3)


def test_the_first_weights_may_be_evaluated() -> None:
    assert ReportOnce(ReportedProgress(0)).eval(0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=10))
def test_whatever_is_done_again_the_numbers_rise_by_one(moves: list[tuple[int, int]]) -> None:
    once, now, told = ReportOnce(ReportedProgress(0)), 0, []
    for back, advance in moves:
        now = max(0, now - back)
        for _ in range(advance):
            now += 1
            if once.step(now):
                told.append(now)
    assert told == list(range(1, len(told) + 1))
