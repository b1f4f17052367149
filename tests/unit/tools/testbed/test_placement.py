"""Every device has a CPU, and no CPU gives more than it has."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tools.testbed.placement import places


def test_each_share_gets_the_cpu_with_most_left() -> None:
    assert places((0.4, 0.25, 0.25, 0.25), [0, 1]) == [0, 1, 1, 0]
    assert places((0.3, 1.0), [4, 6]) == [6, 4]
    assert places((1.0, 1.0), [0, 1]) == [0, 1]


@pytest.mark.parametrize(
    ("shares", "words"),
    [((0.6, 0.6, 0.6), "2 CPUs cannot give"), ((1.2,), "of one core"), ((0.0,), "of one core")],
)
def test_no_cpu_is_sold_twice(shares: tuple[float, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        places(shares, [0, 1])


def test_shares_may_fill_a_cpu() -> None:
    assert places((0.1,) * 10, [3]) == [3] * 10


def test_a_swap_makes_the_fullest_cpu_emptier() -> None:
    """The largest first alone puts 0.95 on one CPU."""
    assert places((0.6, 0.295, 0.295, 0.18, 0.18, 0.18), [0, 1]) == [0, 0, 1, 1, 1, 1]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(1, 4))
def test_no_move_and_no_swap_helps(hundredths: list[int], count: int) -> None:
    shares = [share / 100 for share in hundredths]
    assume(sum(hundredths) <= 60 * count)  # then it always fits
    chosen = places(shares, list(range(count)))
    loads = [
        sum(s for s, own in zip(shares, chosen, strict=True) if own == c) for c in range(count)
    ]
    fullest = chosen.index(loads.index(max(loads))) if count > 1 else 0
    for cpu in range(count):
        if cpu != chosen[fullest]:
            assert loads[cpu] + shares[fullest] >= max(loads) - 1e-6
