"""When FTPipeHD looks at its cuts, and what it makes of what devices have reported."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.drift_watch import (
    RepartitionSchedule,
    capacities,
    expected_with,
)
from p2ptrain.recovery.profile_corrections import (
    ExpectedSeconds,
    ProfileCorrections,
    StageSeconds,
)

HOLDER, FAST, SLOW = (0, "a"), (1, "b"), (2, "c")
SEATS = (HOLDER, FAST, SLOW)
UNITS = {HOLDER: 6.0, FAST: 5.0, SLOW: 4.0}
"""Seconds by the profile of the device with the data."""

factors = st.floats(0.1, 20.0)


def expected(before: ProfileCorrections) -> dict[Seat, ExpectedSeconds]:
    return expected_with(
        {seat: ExpectedSeconds(seconds, seconds) for seat, seconds in UNITS.items()},
        ProfileCorrections(),
        before,
    )


def busy(took: Mapping[Seat, float], step_seconds: float) -> dict[Seat, StageSeconds]:
    return {seat: StageSeconds(seconds, seconds, step_seconds) for seat, seconds in took.items()}


def looks(watch: RepartitionSchedule, count: int) -> list[int]:
    """After which of so many mini-batches there is a look."""
    one = {seat: StageSeconds(1.0, 1.0) for seat in SEATS}
    return [n for n in range(1, count + 1) if watch.observe(one, 1.0) is not None]


def test_first_after_ten_then_every_hundred_mini_batches() -> None:
    watch = RepartitionSchedule(10, 100)
    watch.begin(SEATS)
    assert looks(watch, 350) == [10, 110, 210, 310]


def test_the_first_mini_batch_of_a_plan_does_not_count() -> None:
    watch = RepartitionSchedule(3, 100)
    watch.begin(SEATS)
    assert watch.observe({seat: StageSeconds(99.0, 99.0) for seat in SEATS}, 50.0) is None
    assert watch.observe({seat: StageSeconds(1.0, 2.0) for seat in SEATS}, 3.0) is None
    found = watch.observe({seat: StageSeconds(2.0, 4.0) for seat in SEATS}, 3.0)
    assert found == {seat: StageSeconds(1.5, 3.0, 3.0) for seat in SEATS}


def test_another_plan_counts_from_its_own_reports_alone() -> None:
    watch = RepartitionSchedule(10, 100)
    watch.begin(SEATS)
    assert looks(watch, 8) == []
    watch.begin(SEATS)
    assert looks(watch, 20) == [10], "after ten of this plan"
    watch.begin(SEATS[:2])
    assert looks(watch, 200) == [], "reports of another plan are none of this one's"


@given(*[factors] * 3)
def test_capacities_are_the_papers_where_devices_have_work(a: float, b: float, c: float) -> None:
    """C_i = mean time of i / sum of T0_l, whatever was believed before."""
    took = {seat: UNITS[seat] * f for seat, f in zip(SEATS, (a, b, c), strict=True)}
    for before in (
        ProfileCorrections(),
        ProfileCorrections(devices={"b": 3.0, "c": 0.5, "d": 7.0}),
    ):
        found = capacities(before, expected(before), busy(took, 0.0))
        for seat, factor in zip(SEATS, (a, b, c), strict=True):
            assert found.of_device(seat[1]) == pytest.approx(factor)
        assert found.of_device("d") == before.of_device("d"), "who is not in the plan stays"
        assert not found.units, "nothing is learned of units"


def test_a_device_of_two_stages_is_judged_by_both() -> None:
    due = {
        (0, "a"): ExpectedSeconds(1.0, 1.0),
        (1, "b"): ExpectedSeconds(4.0, 4.0),
        (2, "a"): ExpectedSeconds(3.0, 3.0),
    }
    took = {(0, "a"): 4.0, (1, "b"): 4.0, (2, "a"): 4.0}
    found = capacities(ProfileCorrections(), due, busy(took, 8.0))
    assert found.of_device("a") == pytest.approx(2.0)
    assert found.of_device("b") == pytest.approx(1.0)


def test_who_waits_most_of_the_time_is_not_taken_for_fast() -> None:
    """One slow device holds up two others: it is judged, and they stay what they were."""
    took = {HOLDER: 6.0, FAST: 1.0, SLOW: 40.0}
    found = capacities(ProfileCorrections(), expected(ProfileCorrections()), busy(took, 41.0))
    assert found.of_device("c") == pytest.approx(10.0)
    assert found.of_device("b") == 1.0
    assert found.of_device("a") == 1.0


@given(st.floats(1.0, 30.0), st.floats(0.001, 1.0), st.floats(1.0, 100.0))
def test_little_work_is_never_believed_to_be_more_than_a_third_of_a_step(
    believed: float, took: float, step_seconds: float
) -> None:
    before = ProfileCorrections(devices={"c": believed})
    due = expected(before)
    seconds = {HOLDER: 6.0, FAST: 5.0, SLOW: took * step_seconds / 3.01}
    found = capacities(before, due, busy(seconds, step_seconds))
    assert found.of_device("c") <= before.of_device("c") * (1 + 1e-9)
    counted = found.of_device("c") * UNITS[SLOW]
    assert counted == pytest.approx(min(due[SLOW].wall, step_seconds / 3), rel=1e-6)


@given(st.tuples(factors, factors, factors), st.tuples(factors, factors, factors))
def test_what_is_expected_follows_what_is_believed(
    old: tuple[float, ...], new: tuple[float, ...]
) -> None:
    before = ProfileCorrections(devices=dict(zip("abc", old, strict=True)))
    after = ProfileCorrections(devices=dict(zip("abc", new, strict=True)))
    found = expected_with(expected(before), before, after)
    for seat, seconds in UNITS.items():
        assert found[seat].wall == pytest.approx(seconds * after.of_device(seat[1]))
