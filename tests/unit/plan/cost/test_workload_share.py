"""A device's part of the work: its units' reference seconds times its samples, of all."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.check_plan import WorkloadShare
from p2ptrain.plan.cost.draft import Draft, StageGroup
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, BatchSplit
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from tests.support import planning_examples

FOUR = planning_examples.profile(
    [(1.0, 1.0), (1.0, 3.0), (2.0, 0.0), (4.0, 4.0)]
)  # parts 2, 4, 2, 8 of 16


def draft(split: BatchSplit, borders: tuple[int, ...], *groups: StageGroup) -> Draft:
    return Draft(split, borders, groups, (1,) * len(groups))


def test_alone_a_device_does_its_units() -> None:
    split = BatchSplit(8, 2)
    both = draft(split, (0, 2, 4), StageGroup((1,), (2,)), StageGroup((0,), (2,)))
    assert WorkloadShare(FOUR).parts(both) == {1: 6 / 16, 0: 10 / 16}


def test_divided_samples_count_by_share() -> None:
    split = BatchSplit(8, 4)
    parts = WorkloadShare(FOUR).parts(draft(split, (0, 4), StageGroup((0, 1), (3, 1))))
    assert parts == {0: 0.75, 1: 0.25}


def test_a_ragged_last_micro_batch_takes_from_the_last_devices() -> None:
    split = BatchSplit(10, 4)  # 4, 4, 2
    parts = WorkloadShare(FOUR).parts(draft(split, (0, 4), StageGroup((0, 1), (3, 1))))
    assert parts == {0: 0.8, 1: 0.2}


def test_dealt_micro_batches_count_by_turn() -> None:
    split = BatchSplit(11, 4)  # 4, 4, 3; dealt a b a
    group = StageGroup((0, 1), (2, 1), Allocation.MICRO_BATCHES)
    assert WorkloadShare(FOUR).parts(draft(split, (0, 4), group)) == {0: 7 / 11, 1: 4 / 11}


def test_the_holder_in_both_ends_sums() -> None:
    split = BatchSplit(4, 1)
    alone = (StageGroup((0,), (1,)), StageGroup((1,), (1,)), StageGroup((0,), (1,)))
    assert WorkloadShare(FOUR).parts(draft(split, (0, 1, 3, 4), *alone)) == {0: 10 / 16, 1: 6 / 16}


def test_times_of_the_plans_micro_batch_count() -> None:
    units = (Unit("a", 0, 1, 0), Unit("b", 0, 1, 0))
    times = (UnitTimes((1.0, 1.0), (1.0, 1.0)), UnitTimes((1.0, 3.0), (1.0, 3.0)))
    work = WorkloadShare(Profile("m", 0, 0, units, 0.0, TimeTable((1, 4), times)))
    assert work.units(0, 1, 1) == 0.5
    assert work.units(0, 1, 4) == 0.25


def test_without_any_time_units_count() -> None:
    assert WorkloadShare(planning_examples.profile([(0.0, 0.0)] * 4)).units(1, 4, 1) == 0.75


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.randoms(use_true_random=False))
@pytest.mark.parametrize("allocation", sorted(EVERY_ALLOCATION))
def test_the_closed_form_is_what_the_pieces_sum_to(
    allocation: Allocation, batch_size: int, micro_batch: int, random: Random
) -> None:
    split = BatchSplit(batch_size, min(micro_batch, batch_size))
    total = split.micro_batch if allocation is Allocation.SAMPLES else split.micro_batches
    count = random.randint(1, min(total, 4))
    borders = [0, *sorted(random.sample(range(1, total), count - 1)), total]
    shares = tuple(b - a for a, b in pairwise(borders))
    group = StageGroup(tuple(range(count)), shares, allocation)
    parts = [group.round_samples(split, place) for place in range(count)]
    assert parts == [sum(planning_examples.pieces(group, split, place)) for place in range(count)]
    assert sum(parts) == batch_size
