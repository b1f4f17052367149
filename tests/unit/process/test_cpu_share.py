from __future__ import annotations

import pytest

from p2ptrain.process.cpu_share import WINDOW_SECONDS, CpuSpan, wall_by_cpu


def test_a_device_of_its_own_takes_a_second_for_one() -> None:
    assert wall_by_cpu([CpuSpan(0.5, 0.5)] * 4) == 1.0
    assert wall_by_cpu([CpuSpan(0.5, 0.51)]) == 1.0  # clocks differ a little


def test_nothing_measured_is_a_device_of_its_own() -> None:
    assert wall_by_cpu([]) == 1.0
    assert wall_by_cpu([CpuSpan(0.1, 0.0)]) == 1.0


def test_slices_longer_than_a_span_are_put_together() -> None:
    """A fifth of a core in slices of 20 ms in 100, seen in spans of 20 ms of processor time."""
    in_a_slice, with_a_pause = CpuSpan(0.02, 0.02), CpuSpan(0.18, 0.02)
    assert wall_by_cpu([in_a_slice, with_a_pause] * 20) == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("first", [0, 3])
def test_what_disturbs_some_of_the_time_does_not_count(first: int) -> None:
    spans = [CpuSpan(1.0, 0.3)] * 6
    spans[first : first + 2] = [CpuSpan(3.0, 0.3)] * 2
    assert wall_by_cpu(spans) == pytest.approx(1.0 / 0.3)


def test_a_short_rest_is_no_window_of_its_own() -> None:
    rest = CpuSpan(WINDOW_SECONDS / 3, WINDOW_SECONDS / 3)
    assert wall_by_cpu([CpuSpan(1.0, 0.5), rest]) > 1.5
