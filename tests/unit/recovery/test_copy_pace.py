"""How much of a copy is read at once, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.snapshot_schedule import (
    MIN_READ_BYTES,
    PACED_SHARE,
    READ_LIMIT_BYTES,
    READ_SECONDS,
    ReadPacing,
    ReadRates,
    SnapshotCost,
    SnapshotSchedule,
    paced_seconds,
    read_bytes,
)


def test_reads_spread_over_the_time_there_is() -> None:
    pacing = ReadPacing(begun=100.0, seconds=10.0)
    assert pacing.wait_seconds(1000, now=100.0) == 0.0
    assert pacing.wait_seconds(500, now=101.0) == 4.0
    assert pacing.wait_seconds(100, now=109.5) == 0.0
    assert pacing.wait_seconds(0, now=103.0) == 7.0
    assert ReadPacing(5.0, 0.0).wait_seconds(0, now=5.0) == 0.0


def test_after_a_long_pause_a_copy_is_here_before_anybody_gives_it_up() -> None:
    awaited = SnapshotSchedule(SnapshotCost(0.1, (), 1.0), 0, now=0.0).patience_seconds
    assert paced_seconds(10.0) == 10.0 * PACED_SHARE
    assert paced_seconds(3600.0) < awaited


@given(rate=st.floats(0.0, 1e10))
def test_a_read_takes_so_much_of_a_link_within_limits(rate: float) -> None:
    size = read_bytes(rate)
    assert MIN_READ_BYTES <= size <= READ_LIMIT_BYTES
    if MIN_READ_BYTES < size < READ_LIMIT_BYTES:
        assert size <= READ_SECONDS * rate < size + 1


def test_reads_grow_from_small_tensors_as_well() -> None:
    rates = ReadRates()
    assert rates.next_read_bytes("a") == MIN_READ_BYTES
    rates.read("a", 64_000, 0.01)
    assert rates.next_read_bytes("a") == 640_000
    rates.read("a", 6_000, 0.01)  # a message's time: the link is no slower for it
    assert rates.next_read_bytes("a") == 640_000
    rates.read("a", 640_000, 0.4)
    assert rates.next_read_bytes("a") == 160_000
    assert rates.next_read_bytes("b") == MIN_READ_BYTES
