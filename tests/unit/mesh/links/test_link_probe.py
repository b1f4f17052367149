"""A link's rate from when its bytes were acknowledged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.mesh.links.link_probe import MAX_BY_ALL, chunks_per_s


@given(
    rate=st.floats(0.5, 1e4),
    chunks=st.integers(2, 50),
    late=st.floats(0.0, 1.0),
    started=st.floats(0, 1e5),
)
def test_how_long_the_first_bytes_are_under_way_is_no_part_of_it(
    rate: float, chunks: int, late: float, started: float
) -> None:
    delay = late * (MAX_BY_ALL - 1) * chunks / rate
    arrivals = [started + delay + (number + 1) / rate for number in range(chunks)]
    assert chunks_per_s(started, arrivals) == pytest.approx(rate, rel=1e-2)


def test_what_is_acknowledged_at_once_after_a_pause_shows_no_fast_link() -> None:
    arrivals = [1.0 + 1e-6 * number for number in range(10)]
    assert chunks_per_s(0.0, arrivals) == pytest.approx(10 * MAX_BY_ALL, rel=1e-3)


def test_one_late_acknowledgement_changes_little() -> None:
    arrivals = [0.1 * number for number in range(1, 11)]
    arrivals[3] = arrivals[4]
    assert chunks_per_s(0.0, arrivals) == pytest.approx(10.0, rel=0.02)


def test_of_one_moment_only_what_it_took_till_then_is_known() -> None:
    assert chunks_per_s(2.0, [2.5]) == 2.0
    assert chunks_per_s(2.0, [2.5] * 4) == 8.0
