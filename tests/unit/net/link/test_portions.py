from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.net.frame import CHUNK_LIMIT_BYTES
from p2ptrain.net.link.flow_control import (
    FRAME_SECONDS,
    MIN_FRAME_BYTES,
    MIN_UNSENT_BYTES,
    UNKNOWN,
    UNSENT_SECONDS,
    portions,
)

MBIT = 125_000.0


def test_the_rate_is_unknown_at_first() -> None:
    assert portions(None) == UNKNOWN


@pytest.mark.parametrize(
    ("at_least", "frame_kib", "lowest_kib"),
    [(1 * MBIT, 32, 32), (60 * MBIT, 64, 128), (100 * MBIT, 64, 256), (1e9, 64, 256)],
)
def test_what_a_link_took_without_a_wait_counts(
    at_least: float, frame_kib: int, lowest_kib: int
) -> None:
    """More of it in the lowest lane, where a byte must be cheap and nobody waits."""
    found = portions(None, at_least)
    sizes = (found.frame_bytes, found.lowest_frame_bytes, found.unsent_bytes)
    assert sizes == (frame_kib * 1024, lowest_kib * 1024, UNKNOWN.unsent_bytes)


@pytest.mark.parametrize(
    ("bytes_per_s", "frame_kib", "unsent_kib"),
    [(1 * MBIT, 4, 8), (10 * MBIT, 16, 8), (100 * MBIT, 256, 128), (1000 * MBIT, 256, 1024)],
)
def test_sizes_follow_the_rate(bytes_per_s: float, frame_kib: int, unsent_kib: int) -> None:
    found = portions(bytes_per_s)
    assert (found.frame_bytes // 1024, found.unsent_bytes // 1024) == (frame_kib, unsent_kib)


@settings(derandomize=True, deadline=None)
@given(bytes_per_s=st.floats(1.0, 1e11))
def test_nothing_takes_longer_than_it_should_but_the_least(bytes_per_s: float) -> None:
    found = portions(bytes_per_s)
    assert found.frame_bytes <= max(bytes_per_s * FRAME_SECONDS, MIN_FRAME_BYTES)
    assert found.unsent_bytes <= max(bytes_per_s * UNSENT_SECONDS, MIN_UNSENT_BYTES)
    assert found.lowest_frame_bytes == found.frame_bytes <= CHUNK_LIMIT_BYTES
