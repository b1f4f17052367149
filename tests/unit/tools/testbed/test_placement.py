"""Every device has a CPU, and no CPU gives more than it has."""

from __future__ import annotations

import pytest

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
