from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.net.frame import CHUNK_LIMIT_BYTES
from p2ptrain.net.link.flow_control import (
    FRAME_SECONDS,
    HELD_BYTES,
    MIN_FRAME_BYTES,
    MIN_UNSENT_BYTES,
    PROVING_BYTES,
    UNKNOWN,
    UNSENT_SECONDS,
    WINDOW_SECONDS,
    LinkRateMeter,
    StallWatch,
    portions,
)


def send(meter: LinkRateMeter, rate: float, seconds: float, begin: float, waiting: bool) -> float:
    """Write at `rate` bytes/s in steps of 10 ms; returns when it ends."""
    now = begin
    while now < begin + seconds:
        meter.wrote(int(rate * 0.01), now)
        if waiting:
            meter.waited()
        now += 0.01
    return now


def test_measures_a_link_that_makes_us_wait() -> None:
    meter = LinkRateMeter()
    send(meter, 12.5e6, 2.0, 0.0, waiting=True)
    assert meter.bytes_per_s == pytest.approx(12.5e6, rel=0.15)


def test_a_link_that_never_limited_us_is_unknown() -> None:
    meter = LinkRateMeter()
    send(meter, 1e6, 2.0, 0.0, waiting=False)
    assert meter.bytes_per_s is None


def test_idle_time_does_not_count() -> None:
    meter = LinkRateMeter()
    now = 0.0
    for _ in range(10):
        now = send(meter, 12.5e6, WINDOW_SECONDS * 2, now, waiting=True)
        meter.idle(now)
        now += 30.0
    assert meter.bytes_per_s == pytest.approx(12.5e6, rel=0.25)


def test_a_burst_into_empty_buffers_is_no_measurement() -> None:
    meter = LinkRateMeter()
    meter.wrote(10**6, 0.0)
    meter.waited()
    meter.idle(0.001)
    assert meter.bytes_per_s is None


def test_bursts_that_had_to_wait_are_a_measurement_together() -> None:
    """A megabyte at a time is 8 ms at 1 Gbit/s, of which buffers swallow an eighth."""
    meter, now, rate = LinkRateMeter(), 0.0, 125e6
    for _ in range(4):
        for part in range(16):
            meter.wrote(2**16, now + max(part * 2**16 - HELD_BYTES, 0) / rate)
            meter.waited()
        meter.idle(now + (2**20 - HELD_BYTES) / rate)
        now += 1.0
    assert meter.bytes_per_s == pytest.approx(rate, rel=0.01)


def test_a_faster_link_shows_without_waiting() -> None:
    meter = LinkRateMeter()
    now = send(meter, 1e6, 1.0, 0.0, waiting=True)
    meter.idle(now)
    send(meter, 50e6, 0.5, now + 1, waiting=False)
    assert meter.bytes_per_s == pytest.approx(50e6, rel=0.15)


def test_a_slower_link_shows_when_waiting() -> None:
    meter = LinkRateMeter()
    now = send(meter, 50e6, 1.0, 0.0, waiting=True)
    send(meter, 1e6, 1.0, now, waiting=True)
    assert meter.bytes_per_s == pytest.approx(1e6, rel=0.2)


def test_what_left_without_waiting_is_known_to_pass() -> None:
    meter = LinkRateMeter()
    send(meter, 9e6, 2.0, 0.0, waiting=False)
    assert meter.bytes_per_s is None
    assert 9e6 / 2 < meter.at_least_bytes_per_s < 9e6


def test_much_at_once_without_a_wait_is_known_to_pass_too() -> None:
    meter = LinkRateMeter()
    meter.wrote(PROVING_BYTES // 2, 0.0)
    meter.wrote(PROVING_BYTES // 2, 0.004)
    meter.idle(0.008)
    assert meter.bytes_per_s is None
    assert meter.at_least_bytes_per_s == pytest.approx((PROVING_BYTES - HELD_BYTES) / 0.008)


def test_a_burst_that_had_to_wait_proves_nothing() -> None:
    meter = LinkRateMeter()
    meter.wrote(PROVING_BYTES, 0.0)
    meter.waited()
    meter.idle(0.008)
    assert meter.bytes_per_s is None
    assert meter.at_least_bytes_per_s == 0.0


def first_stall(
    received: Callable[[int], int], partial: bool = True, until: int = 100
) -> int | None:
    """At which second a watch of 10 s and 4096 bytes gives up, asked once a second."""
    watch = StallWatch(10.0, 4096)
    for second in range(until):
        if watch.stalled(partial, received(second), float(second)):
            return second
    return None


def test_silence_inside_a_message_is_a_stall() -> None:
    """S15: a header, then silence."""
    assert first_stall(lambda second: 500) == 10


def test_a_byte_a_second_is_a_stall() -> None:
    """S15: a byte a second is a stall."""
    assert first_stall(lambda second: second) == 10


def test_a_slow_link_is_not() -> None:
    assert first_stall(lambda second: second * 1000) is None


def test_silence_between_messages_is_not() -> None:
    assert first_stall(lambda second: 500, partial=False) is None


def test_progress_restarts_the_time() -> None:
    assert first_stall(lambda second: 0 if second < 8 else 5000) == 18


def test_the_end_of_a_message_restarts_the_time() -> None:
    watch = StallWatch(10.0, 4096)
    assert not watch.stalled(True, 0, 0.0)
    assert not watch.stalled(False, 0, 9.0)
    assert not watch.stalled(True, 0, 11.0)
    assert not watch.stalled(True, 0, 20.0)
    assert watch.stalled(True, 0, 21.0)


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
