"""Another clock's offset, from round trips."""

from __future__ import annotations

import random

import pytest

from p2ptrain.holder.trace.span_collector import WINDOW_SECONDS, ClockOffsets


def test_the_best_round_trip_of_a_window_counts() -> None:
    clock = ClockOffsets()
    clock.add(100.0, 350.0, 101.0)
    clock.add(102.0, 350.0 + 1.99, 102.02)  # the other is 249.98 s ahead, give or take 10 ms
    clock.add(103.0, 353.4, 104.0)
    assert clock.error_seconds == pytest.approx(0.01)
    assert clock.aligned(352.0) == pytest.approx(352.0 - 249.98)


def test_a_clock_that_drifts_is_followed_within_the_error_that_is_said() -> None:
    chance, clock, drift = random.Random(3), ClockOffsets(), 1 + 80e-6

    def theirs(now: float) -> float:
        return 5000.0 + now * drift

    now = 0.0
    while now < 50 * WINDOW_SECONDS:
        there, back = chance.uniform(1e-4, 8e-3), chance.uniform(1e-4, 8e-3)
        clock.add(now, theirs(now + there), now + there + back)
        now += 1.0
    error = clock.error_seconds
    assert error is not None
    assert error < 4e-3
    wrong = [abs(clock.aligned(theirs(at)) - at) for at in (7.0, 333.3, 640.1, 985.0)]
    assert max(wrong) <= error + 80e-6 * WINDOW_SECONDS


def test_of_a_device_that_has_not_answered_nothing_is_known() -> None:
    clock = ClockOffsets()
    assert clock.error_seconds is None
    with pytest.raises(ValueError, match="no round trip"):
        clock.aligned(1.0)
