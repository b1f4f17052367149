"""When snapshots are taken, by what they cost; and when the parts of a copy are read."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.recovery.recovery_settings import HOME
from p2ptrain.recovery.snapshot_schedule import (
    COSTS_LEFT_OUT,
    IDLE_SHARE,
    MAX_OF_ESTIMATED,
    MIN_OF_ESTIMATED,
    MIN_READ_BYTES,
    PACED_SHARE,
    PATIENCE_LIMIT,
    READ_LIMIT_BYTES,
    READ_SECONDS,
    WAIT_SHARE,
    ReadPacing,
    ReadRates,
    SnapshotCost,
    SnapshotSchedule,
    SnapshotTransfer,
    paced_seconds,
    read_bytes,
)

COST_SHARE, FIRST_ROUNDS = HOME.snapshot_cost_share, HOME.first_snapshot_rounds

seconds = st.floats(1e-4, 100.0)
costs = st.builds(
    SnapshotCost,
    cpu_seconds=st.floats(0.0, 100.0),
    transfers=st.lists(
        st.builds(
            SnapshotTransfer, seconds=st.floats(0.0, 1000.0), busy_seconds=st.floats(0.0, 10.0)
        ),
        max_size=3,
    ).map(tuple),
    round_seconds=seconds,
)


@given(costs)
def test_what_is_computed_again_is_bounded_and_else_the_cost(cost: SnapshotCost) -> None:
    cadence = SnapshotSchedule(cost, 0, 0.0)
    rounds = cadence.interval_rounds
    assert rounds >= 1
    assert rounds == 1 or rounds * cost.round_seconds <= HOME.replay_limit_seconds
    if rounds < int(HOME.replay_limit_seconds / cost.round_seconds):
        assert cost.estimated_seconds <= COST_SHARE * rounds * cost.round_seconds * (1 + 1e-9)
        for transfer in cost.transfers:
            free = cost.round_seconds - transfer.busy_seconds
            if free > 1e-4:
                assert transfer.seconds <= IDLE_SHARE * rounds * free * (1 + 1e-9)


UNRECKONED = SnapshotCost(0.0, (), round_seconds=31.0)
SHORTER_AND_SHORTER = [(31.0, True), (30.0, True), (1.0, False), (21.0, True), (1.0, False)]


@given(costs, st.lists(st.tuples(seconds, st.booleans()), max_size=60))
@example(UNRECKONED, SHORTER_AND_SHORTER)
def test_never_two_at_once_and_never_more_often_than_it_says(
    cost: SnapshotCost, course: list[tuple[float, bool]]
) -> None:
    cadence = SnapshotSchedule(cost, 0, 0.0)
    now, last, under_way = 0.0, 0, False
    for step, (took, whole) in enumerate(course, start=1):
        wanted = cadence.wants(step)
        assert not (wanted and under_way)
        interval = cadence.interval_rounds if last else min(cadence.interval_rounds, FIRST_ROUNDS)
        assert wanted == (not under_way and step - last >= interval)
        if wanted:
            cadence.ordered(step, now)
            last, under_way = step, True
        now += took
        cadence.round_done(step, now)
        if under_way and whole:
            cadence.ended(whole=True)
            under_way = False
        reckoned = cost.estimated_seconds
        least, most = MIN_OF_ESTIMATED * reckoned, MAX_OF_ESTIMATED * reckoned or math.inf
        assert least * (1 - 1e-9) <= cadence.cost_seconds <= most * (1 + 1e-9)


def test_bytes_and_links_say_how_often() -> None:
    cost = SnapshotCost(0.1, (SnapshotTransfer(0.2, 0.95),), round_seconds=1.0)
    cadence = SnapshotSchedule(cost, 10, 0.0)
    by_cost = math.ceil((0.1 + WAIT_SHARE * 0.2 * 0.95) / COST_SHARE)
    by_links = math.ceil(0.2 / (IDLE_SHARE * 0.05))
    assert (by_cost, by_links) == (7, 8)
    assert cadence.interval_rounds == 8
    assert not cadence.wants(17)
    assert cadence.wants(18)


def test_the_first_versions_wait_for_each_other() -> None:
    """However little they are estimated to cost: each finds new memory."""
    cadence = SnapshotSchedule(SnapshotCost(0.0, (), round_seconds=1.0), 0, 0.0)
    kept = []
    for step in range(1, 20):
        if cadence.wants(step):
            kept.append(step)
            cadence.ordered(step, float(step))
            cadence.ended(whole=True)
        cadence.round_done(step, float(step))
    assert kept == [FIRST_ROUNDS, 2 * FIRST_ROUNDS, 2 * FIRST_ROUNDS + 1, 18, 19]


def test_training_waits_for_copies_at_interfaces_that_it_uses() -> None:
    transfers = (
        SnapshotTransfer(4.0, 0.25),
        SnapshotTransfer(2.0, 1.0),
        SnapshotTransfer(1.0, 9.0),
    )
    cost = SnapshotCost(0.1, transfers, round_seconds=2.0)
    assert cost.estimated_seconds == 0.1 + WAIT_SHARE * max(4.0 / 8, 2.0 / 2, 1.0)
    assert SnapshotCost(0.1, (), 0.0).estimated_seconds == 0.1


AHEAD = 2
"""Rounds that are ordered before the one under way has ended."""


def drive(cadence: SnapshotSchedule, quiet: float, disturbed: float, versions: int) -> None:
    """Rounds of `quiet` seconds, three of `disturbed` ones in which a version travels."""
    now, step = 0.0, 0

    def passes(seconds: float) -> bool:
        nonlocal now, step
        step, now = step + 1, now + seconds
        return cadence.round_done(step, now)

    for _ in range(versions):
        while not cadence.wants(step + AHEAD):
            assert not passes(quiet)
        cadence.ordered(step + AHEAD, now)
        for _ in range(AHEAD):  # until the version's own update there is nothing to be copied
            assert not passes(quiet)
        assert passes(disturbed)
        assert passes(disturbed)
        cadence.ended(whole=True)  # before the round has ended that it has slowed down
        assert passes(disturbed)
    assert not passes(quiet)


@pytest.mark.parametrize(("disturbed", "cost"), [(0.15, 0.15), (0.1, 0.12), (0.4, 0.9)])
def test_what_a_version_is_seen_to_cost_counts_in_the_end(disturbed: float, cost: float) -> None:
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=3.0), 0, 0.0)
    drive(cadence, quiet=0.1, disturbed=disturbed, versions=12)
    assert cadence.round_seconds == pytest.approx(0.1)
    assert cadence.cost_seconds == pytest.approx(cost, rel=0.05)
    assert cadence.interval_rounds == math.ceil(cadence.cost_seconds / (COST_SHARE * 0.1) - 1e-9)


def test_what_nobody_has_estimated_is_seen() -> None:
    """A holder that was started again may not hear of it; and none were made without a pause."""
    cadence = SnapshotSchedule(SnapshotCost(0.0, (), 0.0), 0, 0.0)
    drive(cadence, quiet=0.1, disturbed=0.15, versions=12)
    assert cadence.cost_seconds == pytest.approx(0.15, rel=0.05)
    assert cadence.interval_rounds == math.ceil(cadence.cost_seconds / (COST_SHARE * 0.1) - 1e-9)


def test_rounds_that_differ_anyway_cost_nothing() -> None:
    """Every third one is long: the mean is above the median, with copies and without."""
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=1.0), 0, 0.0)
    now, step = 0.0, 0
    for _ in range(12):
        while not cadence.wants(step + 1) or step % 3:
            step, now = step + 1, now + (0.2 if step % 3 else 0.5)
            cadence.round_done(step, now)
        cadence.ordered(step + 1, now)
        for _ in range(12):
            step, now = step + 1, now + (0.2 if step % 3 else 0.5)
            cadence.round_done(step, now)
        cadence.ended(whole=True)
    assert cadence.round_seconds == pytest.approx(0.2)
    assert cadence.cost_seconds == pytest.approx(MIN_OF_ESTIMATED * 0.2, abs=0.02)


def test_one_version_says_little_about_the_cost() -> None:
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=1.0), 0, 0.0)
    drive(cadence, quiet=0.1, disturbed=0.15, versions=8)
    cost = cadence.cost_seconds
    drive(cadence, quiet=0.1, disturbed=2.0, versions=1)
    assert cadence.cost_seconds == pytest.approx(cost)


def test_what_is_abandoned_says_nothing_about_the_cost_and_is_tried_again_later() -> None:
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=1.0), 0, 0.0)
    cadence.round_done(1, 1.0)
    cadence.ordered(2, 1.0)
    cadence.round_done(2, 2.0)
    cadence.ended(whole=False)
    cadence.round_done(3, 9.0)
    assert cadence.cost_seconds == 0.2
    later = 2 + cadence.interval_rounds
    assert not cadence.wants(later - 1)
    assert cadence.wants(later)


def test_a_version_that_takes_far_too_long_is_late() -> None:
    cadence = SnapshotSchedule(
        SnapshotCost(0.2, (SnapshotTransfer(20.0, 0.0),), round_seconds=1.0), 0, 0.0
    )
    assert not cadence.is_late(1e9)
    cadence.ordered(40, 5.0)
    assert not cadence.is_late(5.0 + cadence.patience_seconds)
    assert cadence.is_late(5.1 + cadence.patience_seconds)
    assert cadence.patience_seconds >= 200.0


def test_an_evaluation_is_no_long_round() -> None:
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=1.0), 0, 0.0)
    cadence.round_done(1, 1.0)
    cadence.pause_over(50.0)
    cadence.round_done(2, 51.0)
    assert cadence.round_seconds == 1.0


def test_after_one_was_given_up_the_next_one_is_awaited_longer() -> None:
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=1.0), 0, 0.0)
    patience = cadence.patience_seconds
    cadence.ordered(1, now=0.0)
    assert cadence.is_late(patience + 1.0)
    cadence.gave_up()
    cadence.ended(whole=False)
    cadence.ordered(2, now=100.0)
    assert not cadence.is_late(100.0 + 2.0 * patience)
    assert cadence.is_late(100.0 + 2.0 * patience + 1.0)
    for _ in range(20):
        cadence.gave_up()
    assert cadence.patience_seconds == PATIENCE_LIMIT * patience


def test_what_new_memory_costs_does_not_count() -> None:
    """The first versions are copied into memory that the process gets from the kernel then."""
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=3.0), 0, 0.0)
    drive(cadence, quiet=0.1, disturbed=0.5, versions=COSTS_LEFT_OUT)
    assert cadence.cost_seconds == 0.2
    drive(cadence, quiet=0.1, disturbed=0.15, versions=9)
    assert cadence.cost_seconds == pytest.approx(0.15)


def test_the_next_version_may_be_ordered_before_the_round_has_ended_in_which_one_is_whole() -> None:
    cadence = SnapshotSchedule(SnapshotCost(0.2, (), round_seconds=1.0), 0, 0.0)
    now = 0.0
    for step in range(1, 60, 3):  # a version every three rounds, of which it slows down one
        cadence.ordered(step, now)
        for slow, number in enumerate((step, step + 1)):
            now += 1.5 if slow else 1.0
            assert cadence.round_done(number, now) == bool(slow)
        cadence.ended(whole=True)
        cadence.ordered(step + 3, now)
        now += 1.0
        assert not cadence.round_done(step + 2, now)
    assert cadence.cost_seconds == pytest.approx(0.5)


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
