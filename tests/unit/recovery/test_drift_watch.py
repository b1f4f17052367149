"""Rounds beside what a plan expects of them; and FTPipeHD's capacities and looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.recovery.commit import Seat
from p2ptrain.recovery.drift_watch import (
    CONFIRMED,
    FEW_ROUNDS,
    FIRST_ROUNDS,
    FIRST_SECONDS,
    LATER_ROUNDS,
    TOLERANCE,
    DriftWatch,
    DriftWindow,
    RepartitionSchedule,
    capacities,
    expected_with,
)
from p2ptrain.recovery.profile_corrections import (
    ExpectedSeconds,
    ProfileCorrections,
    StageSeconds,
)
from p2ptrain.recovery.recovery_settings import HOME

ONE, OTHER = (0, "a"), (1, "b")
ROUND_SECONDS = 1.2
EXPECTED = {
    ONE: ExpectedSeconds(wall=0.4, cpu=0.2, beside=0.04),
    OTHER: ExpectedSeconds(wall=0.8, cpu=0.8),
}


def rounds(
    watch: DriftWatch,
    factors: Sequence[float],
    seat: Seat = OTHER,
    seconds: float = ROUND_SECONDS,
    copying: Sequence[bool] = (),
) -> list[tuple[int, DriftWindow]]:
    """The looks, with the number of the round, after which `seat` took so many times as long.

    Args:
        copying: of which rounds copies were on their way; of those not named none.
    """
    looks = []
    for number, factor in enumerate(factors, start=1):
        busy = {s: StageSeconds(due.wall, due.cpu) for s, due in EXPECTED.items()}
        busy[seat] = StageSeconds(factor * EXPECTED[seat].wall, EXPECTED[seat].cpu)
        beside = number <= len(copying) and copying[number - 1]
        look = watch.observe(busy, seconds, copying=beside)
        if look is not None:
            looks.append((number, look))
            watch.settle(EXPECTED)
    return looks


def test_the_first_round_does_not_count_and_ten_more_are_looked_at() -> None:
    looks = rounds(DriftWatch(EXPECTED), [9.0] + [1.0] * (FIRST_ROUNDS + 2 * LATER_ROUNDS))
    assert [number for number, _ in looks] == [
        1 + FIRST_ROUNDS,
        1 + FIRST_ROUNDS + LATER_ROUNDS,
        1 + FIRST_ROUNDS + 2 * LATER_ROUNDS,
    ]
    assert looks[0][1].busy[OTHER] == StageSeconds(0.8, 0.8, round_seconds=ROUND_SECONDS)


def test_of_long_rounds_fewer_are_enough_for_the_first_look() -> None:
    def numbers(seconds: float) -> list[int]:
        factors = [1.0] * (1 + FIRST_ROUNDS + LATER_ROUNDS)
        return [number for number, _ in rounds(DriftWatch(EXPECTED), factors, seconds=seconds)]

    assert numbers(FIRST_SECONDS / FIRST_ROUNDS) == [1 + FIRST_ROUNDS, 1 + FIRST_ROUNDS + 100]
    assert numbers(FIRST_SECONDS / 6) == [1 + 6, 1 + 6 + LATER_ROUNDS]
    assert numbers(FIRST_SECONDS) == [1 + FEW_ROUNDS, 1 + FEW_ROUNDS + LATER_ROUNDS]


def test_rounds_beside_a_copy_do_not_count() -> None:
    factors = [1.0] + [1.0, 4.0, 4.0] * 5
    copying = [False] + [False, True, True] * 5
    assert not rounds(DriftWatch(EXPECTED), factors, copying=copying)
    assert rounds(DriftWatch(EXPECTED), [1.0] + [4.0] * 15, copying=copying)


def test_where_copies_never_end_rounds_count() -> None:
    """Else a slow link, on which they take all of the time, would hide every other slowness."""
    before = int(HOME.drift_copying_seconds / ROUND_SECONDS)
    factors = [1.0] + [4.0] * (before + CONFIRMED)
    ((number, _),) = rounds(DriftWatch(EXPECTED), factors, copying=[True] * len(factors))
    assert number == 1 + before + CONFIRMED


def test_what_is_off_three_times_in_a_row_is_looked_at_at_once() -> None:
    looks = rounds(DriftWatch(EXPECTED), [1.0, 1.0, 4.0, 4.0, 4.2])
    ((number, look),) = looks
    assert number == 5
    assert look.busy[OTHER].wall == 3.2
    assert "stage 1" in look.reason


def test_a_device_that_has_become_faster_drifts_too() -> None:
    """Where it has work for all of the round, or others hold it up less than it used to take."""
    for factor, seconds in ((0.5, 0.4), (0.25, 0.6)):
        looks = rounds(DriftWatch(EXPECTED), [1.0, factor, factor, factor], seconds=seconds)
        assert [number for number, _ in looks] == [4]


def test_a_device_that_waits_for_others_and_looks_faster_for_it_does_not_drift() -> None:
    """So a device with a share of a core looks: what it has not used, it has in hand."""
    assert not rounds(DriftWatch(EXPECTED), [1.0, *[0.6] * 9])


def test_a_freeze_of_one_round_is_no_drift() -> None:
    assert not rounds(DriftWatch(EXPECTED), [1.0, 1.0, 30.0, 1.0, 1.0, 30.0, 1.0, 30.0, 30.0])


def test_too_slow_and_too_fast_in_turn_is_no_drift() -> None:
    assert not rounds(DriftWatch(EXPECTED), [1.0, 2.0, 0.5, 2.0, 0.5, 2.0, 0.5])


def test_what_messages_explain_is_not_off() -> None:
    factor = 1.1 * (1 + 0.9 * TOLERANCE)  # a tenth is for messages
    assert not rounds(DriftWatch(EXPECTED), [1.0] + [factor] * 8, ONE)


def test_short_rounds_are_put_together() -> None:
    seconds = HOME.drift_window_seconds / 10
    looks = rounds(DriftWatch(EXPECTED), [1.0] + [3.0] * 100, seconds=seconds)
    assert looks[0][0] >= 1 + 10 * CONFIRMED


def test_rounds_of_milliseconds_are_not_looked_at_all_the_time() -> None:
    every = round(HOME.drift_look_seconds / 0.004)
    looks = rounds(DriftWatch(EXPECTED), [1.0] * (4 * every), seconds=0.004)
    numbers = [number for number, _ in looks]
    assert len(numbers) == 3
    assert min(b - a for a, b in pairwise(numbers)) >= every


@given(st.lists(st.floats(1 / (1 + TOLERANCE) + 1e-6, 1 + TOLERANCE - 1e-6), max_size=60))
def test_noise_within_the_tolerance_never_hastens_a_look(noise: list[float]) -> None:
    looks = rounds(DriftWatch(EXPECTED), [1.0, *noise])
    assert all(number == 1 + FIRST_ROUNDS for number, _ in looks)


@given(st.floats(1.3, 40.0), st.integers(1, 50))
def test_what_lasts_is_found_in_three_rounds(factor: float, after: int) -> None:
    looks = rounds(DriftWatch(EXPECTED), [1.0] * after + [factor] * CONFIRMED)
    assert looks[-1][0] <= after + CONFIRMED + (after == 1)


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
