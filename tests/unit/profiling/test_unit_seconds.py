from __future__ import annotations

import pytest

from p2ptrain.plan.types.unit_times import UnitTimes
from p2ptrain.profiling.unit_passes import (
    MIN_OWN_PART,
    BatchPasses,
    UnitPass,
    WholePass,
    unit_times,
)


def by_units(*seconds: float, weight: tuple[float, ...] | None = None) -> UnitPass:
    """Backwards take twice as long as forwards."""
    backward = tuple(2 * each for each in seconds)
    return UnitPass(seconds, backward, weight, 3 * sum(seconds))


def whole(forward: float, backward: float) -> WholePass:
    return WholePass(forward, backward, forward + backward)


SPLIT = by_units(1.0, 3.0, weight=(0.5, 3.0))


def test_medians_by_unit_are_scaled_to_wall_time() -> None:
    size = BatchPasses(4, [SPLIT], [by_units(1, 3), by_units(5, 4), by_units(2, 2)])
    assert unit_times([size], 10.0)[4] == UnitTimes((20, 30), (40, 60), (10, 30))


def test_what_switching_costs_is_the_same_for_every_unit() -> None:
    size = BatchPasses(4, [SPLIT], [by_units(2, 4)], [whole(9, 9), whole(4, 8)])
    times = unit_times([size], 1.0)[4]
    assert times.forward == (1.0, 3.0)
    assert times.backward == (2.0, 6.0)


def test_switching_measured_with_the_smallest_size_is_taken_off_larger_ones() -> None:
    small = BatchPasses(4, [SPLIT], [by_units(2, 4)], [whole(4, 8)])
    larger = BatchPasses(16, [by_units(5, 9, weight=(2.0, 9.0))])
    assert unit_times([small, larger], 1.0)[16].forward == (4.0, 8.0)


def test_a_unit_is_never_all_switching() -> None:
    size = BatchPasses(4, [SPLIT], [by_units(1, 9)], [whole(4, 20)])
    times = unit_times([size], 1.0)[4]
    assert times.forward[0] == pytest.approx(4 * MIN_OWN_PART / (MIN_OWN_PART + 6))
    assert sum(times.forward) == pytest.approx(4.0)


def test_the_sum_is_what_the_model_takes_as_one_stage() -> None:
    small = BatchPasses(4, [SPLIT], [by_units(2, 4)], [whole(4, 8)])
    larger = BatchPasses(16, [by_units(8, 12)], whole=[whole(10, 30)])
    times = unit_times([small, larger], 2.0)[16]
    assert sum(times.forward) == pytest.approx(20.0)
    assert sum(times.backward) == pytest.approx(60.0)


def test_a_large_size_divides_as_its_own_pass_by_units_says() -> None:
    small = BatchPasses(4, [SPLIT], [by_units(1, 3)], [whole(4, 8)])
    largest = BatchPasses(16, units=[by_units(12, 8)], whole=[whole(99, 99), whole(40, 60)])
    times = unit_times([small, largest], 1.0)[16]
    assert times.forward == pytest.approx((24.0, 16.0))
    assert times.backward == pytest.approx((36.0, 24.0))
    assert times.weight == pytest.approx((9.0, 12.0))  # shares as in the smallest


def test_a_first_whole_pass_that_took_longer_than_the_units_does_not_count() -> None:
    size = BatchPasses(4, [SPLIT], [by_units(2, 4)], [whole(9, 30)])
    assert (
        unit_times([size], 1.0)[4]
        == unit_times([BatchPasses(4, [SPLIT], [by_units(2, 4)])], 1.0)[4]
    )
    alone = BatchPasses(4, [SPLIT], [], [whole(9, 30)])
    assert sum(unit_times([alone], 1.0)[4].forward) == pytest.approx(9.0), "nothing else tells"


def test_a_size_that_was_run_as_a_whole_only_divides_as_the_one_before() -> None:
    small = BatchPasses(4, [SPLIT], [by_units(2, 4)], [whole(9, 9), whole(6, 12)])
    larger = BatchPasses(16, whole=[whole(18, 36)])
    times = unit_times([small, larger], 1.0)[16]
    assert times.forward == pytest.approx((6.0, 12.0))
    assert times.weight == pytest.approx((3.0, 12.0))


def test_of_several_split_passes_the_first_does_not_count() -> None:
    cold = by_units(1.0, 3.0, weight=(2.0, 6.0))
    size = BatchPasses(4, [cold, SPLIT], [by_units(1, 3)])
    assert unit_times([size], 1.0)[4].weight == (0.5, 3.0)
    assert unit_times([BatchPasses(4, [cold], [by_units(1, 3)])], 1.0)[4].weight == (2.0, 6.0)
