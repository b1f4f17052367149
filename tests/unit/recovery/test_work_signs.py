"""Slow devices are waited for as long as they give signs of work, those that hang are not."""

from __future__ import annotations

from math import inf

import pytest

from p2ptrain.recovery.work_signs import TALKS, USUAL, SignLimits, Signs, WorkSign


def _still_waits(signs: Signs, sign: WorkSign | None, seconds: float) -> float:
    """Until when it is waited for, asked each second."""
    now = 0.0
    while now < seconds:
        now += USUAL.look_seconds
        if sign is not None:
            signs.heard(sign, now)
        if signs.why_not(now) is not None:
            return now
    return inf


def test_one_that_answers_nothing_is_waited_for_seconds() -> None:
    signs = Signs(0.0)
    assert _still_waits(signs, None, 100.0) == USUAL.silent_seconds
    assert signs.why_not(6.0) == "has not answered for 6 s"


def test_one_that_works_may_take_minutes() -> None:
    assert _still_waits(Signs(0.0), WorkSign(3, 0, works=True), USUAL.fruitless_seconds - 1) == inf


def test_one_that_says_so_for_ever_is_not_believed_for_ever() -> None:
    until = _still_waits(Signs(0.0), WorkSign(3, 0, works=True), 10_000.0)
    assert until == USUAL.fruitless_seconds


def test_one_that_answers_and_is_idle_has_lost_what_it_was_asked() -> None:
    signs = Signs(0.0)
    assert _still_waits(signs, WorkSign(3, 0), 100.0) == USUAL.still_seconds
    assert signs.why_not(8.0) == "has done none of its work for 8 s"


@pytest.mark.parametrize("rises", ["tasks", "fetched_bytes"])
def test_what_it_shows_counts_however_slowly_it_comes(rises: str) -> None:
    signs = Signs(0.0)
    for now in range(1, 2000):
        shown = {"tasks": 1, "fetched_bytes": 1, rises: 1 + now // 7}
        signs.heard(WorkSign(**shown), float(now))
        assert signs.why_not(float(now)) is None


@pytest.mark.parametrize(("bytes_per_s", "until"), [(100.0, 6.0), (50_000.0, 30.0)])
def test_on_a_link_that_is_full_an_answer_may_take_longer(bytes_per_s: float, until: float) -> None:
    signs, now = Signs(0.0), 0.0
    while signs.why_not(now) is None:
        now += 1.0
        signs.link_has(int(bytes_per_s * now), now)
    assert now == until


def test_one_that_only_has_to_answer_may_be_idle() -> None:
    assert _still_waits(Signs(0.0, TALKS), WorkSign(3, 0), 10_000.0) == inf
    assert _still_waits(Signs(0.0, SignLimits()), WorkSign(3, 0), 10_000.0) == USUAL.still_seconds
