from __future__ import annotations

import pytest

from p2ptrain.net.link.flow_control import HELD_BYTES, PROVING_BYTES, WINDOW_SECONDS, LinkRateMeter


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
