"""An update counts once every seat is ready."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.training.recovery.committing import Committing

_SEATS = ((0, "a"), (1, "b"), (1, "c"), (2, "a"))


@given(st.lists(st.permutations(_SEATS), max_size=5))
def test_the_last_seat_decides_whatever_the_order(rounds: list[list[tuple[int, str]]]) -> None:
    committing = Committing(_SEATS, start=7)
    for step, order in enumerate(rounds, 7):
        assert committing.decided == step
        decided = [committing.done(seat, step) for seat in order]
        assert decided == [False, False, False, True]
    assert committing.decided == 7 + len(rounds)


@pytest.mark.parametrize(("seat", "step"), [((0, "a"), 0), ((1, "a"), 1), ((0, "b"), 1)])
def test_who_is_not_asked_does_not_count(seat: tuple[int, str], step: int) -> None:
    with pytest.raises(ProtocolError, match="twice or unasked"):
        Committing(_SEATS, start=1).done(seat, step)


def test_nobody_counts_twice() -> None:
    committing = Committing(_SEATS, start=0)
    committing.done((0, "a"), 0)
    assert committing.missing == set(_SEATS) - {(0, "a")}
    with pytest.raises(ProtocolError):
        committing.done((0, "a"), 0)
