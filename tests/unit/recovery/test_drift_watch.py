"""When rounds are worth a look: not for noise, nor for a freeze, but for what lasts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
)
from p2ptrain.recovery.profile_corrections import ExpectedSeconds, StageSeconds
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
