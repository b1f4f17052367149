"""How rivals divide samples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.bench.rivals import weighted_shares
from tools.bench.worker.channel import even_pieces

exactly = settings(derandomize=True, deadline=None, max_examples=60)
weights = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6)


@exactly
@given(st.integers(6, 3000), weights)
def test_shares_add_up_and_lie_near_their_weights(total: int, own: list[float]) -> None:
    shares = weighted_shares(total, own)
    assert sum(shares) == total
    assert min(shares) >= 1
    for share, weight in zip(shares, own, strict=True):
        exact = total * weight / sum(own)
        assert abs(share - exact) < len(own) or share == 1


def test_equal_devices_get_equal_shares() -> None:
    assert sorted(weighted_shares(1024, [0.3] * 5)) == [204, 205, 205, 205, 205]


@pytest.mark.parametrize(("total", "own"), [(2, [1.0, 1.0, 1.0]), (9, [1.0, 0.0])])
def test_shares_that_cannot_be(total: int, own: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        weighted_shares(total, own)


@exactly
@given(st.integers(1, 500), st.integers(1, 500))
def test_pieces_are_as_few_and_as_equal_as_possible(total: int, largest: int) -> None:
    pieces = even_pieces(total, largest)
    assert sum(pieces) == total
    assert max(pieces) <= largest
    assert max(pieces) - min(pieces) <= 1
    assert (len(pieces) - 1) * largest < total
