"""A round is over, and its update counts, once every seat has finished it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.recovery.commit import CommitTracker, Seat

_SEATS = ((0, "a"), (1, "b"), (1, "c"), (2, "a"))


@given(st.lists(st.permutations(_SEATS), max_size=5))
def test_the_last_seat_decides_whatever_the_order(rounds: list[list[Seat]]) -> None:
    committing = CommitTracker(_SEATS, start=7)
    for step, order in enumerate(rounds, 7):
        committing.order(step)
        assert committing.over == step
        decided = [committing.done(seat, step) for seat in order]
        assert decided == [False, False, False, True]
    assert committing.over == 7 + len(rounds)


@given(st.permutations([(seat, number) for seat in _SEATS for number in range(3)]))
def test_words_on_rounds_may_overtake_one_another(words: list[tuple[Seat, int]]) -> None:
    committing = CommitTracker(_SEATS)
    for number in range(3):
        committing.order(number)
    said: set[tuple[Seat, int]] = set()
    over: set[int] = set()
    for seat, number in words:
        said.add((seat, number))
        if committing.done(seat, number):
            over.add(number)
        assert over == {n for n in range(3) if all((seat, n) in said for seat in _SEATS)}
        oldest = min({0, 1, 2} - over, default=3)
        assert committing.over == oldest
        assert committing.missing == {
            seat for seat in _SEATS if oldest < 3 and (seat, oldest) not in said
        }


@pytest.mark.parametrize(("seat", "step"), [((0, "a"), 0), ((1, "a"), 1), ((0, "b"), 1)])
def test_who_is_not_asked_does_not_count(seat: Seat, step: int) -> None:
    committing = CommitTracker(_SEATS, start=1)
    committing.order(1)
    with pytest.raises(ProtocolError, match="twice or unasked"):
        committing.done(seat, step)


def test_nobody_counts_twice() -> None:
    committing = CommitTracker(_SEATS)
    committing.order(0)
    committing.done((0, "a"), 0)
    assert committing.missing == set(_SEATS) - {(0, "a")}
    with pytest.raises(ProtocolError):
        committing.done((0, "a"), 0)
