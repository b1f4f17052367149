"""Depths within memory: exact, also where one device has both ends of a private plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone, draft_pipeline, peak_bytes
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from tests.support import planning_examples
from tests.support.thorough import examples_of

SPLIT = BatchSplit(10, 2)  # five micro-batches
BORDERS, DEVICES = (0, 1, 2, 3), (0, 1, 0)


def private_cost(home_bytes: int, other_bytes: int = planning_examples.PLENTY) -> CostModel:
    """Three units of 1, 1 and 1 byte a sample, without weights; the ends are at home."""
    profile = planning_examples.profile([(1.0, 1.0)] * 3, activation_bytes=1)
    home, other = planning_examples.cluster("home", "other").devices
    devices = (replace(home, memory_bytes=home_bytes), replace(other, memory_bytes=other_bytes))
    return CostModel(profile, replace(planning_examples.cluster("home", "other"), devices=devices))


def depths(cost: CostModel, *wanted: int) -> tuple[int, ...] | None:
    draft = draft_pipeline(cost, SPLIT, BORDERS, DEVICES, wanted)
    return None if draft is None else draft.warmup


def test_the_last_stage_of_a_private_plan_may_be_deep() -> None:
    assert depths(private_cost(20), 5, 5, 5) == (5, 5, 5)


@pytest.mark.parametrize(
    ("wanted", "fitting"),
    [
        ((5, 5, 5), (5, 5, 1)),  # twelve samples: the first stage comes before the last
        ((3, 3, 3), (3, 3, 3)),
        ((4, 4, 4), (4, 4, 2)),
        ((5, 2, 2), (5, 2, 1)),
    ],
)
def test_what_the_first_stage_leaves_is_the_last_ones(
    wanted: tuple[int, ...], fitting: tuple[int, ...]
) -> None:
    assert depths(private_cost(12), *wanted) == fitting


def test_both_ends_need_memory_for_one_micro_batch() -> None:
    assert depths(private_cost(4), 5, 5, 5) == (1, 1, 1)
    assert depths(private_cost(3), 5, 5, 5) is None
    assert depths(private_cost(20, other_bytes=1), 5, 5, 5) is None


@settings(max_examples=examples_of(20), deadline=None, derandomize=True)
@given(st.integers(0, 22), st.integers(0, 11), st.tuples(*[st.integers(1, 5)] * 3))
def test_depths_that_fit_are_kept_and_others_lowered(
    home_bytes: int, other_bytes: int, drawn: tuple[int, ...]
) -> None:
    cost = private_cost(home_bytes, other_bytes)
    wanted = tuple(sorted(drawn, reverse=True))
    groups = tuple(alone(SPLIT, device) for device in DEVICES)

    def fits(depths: tuple[int, ...]) -> bool:
        peaks = peak_bytes(cost, Draft(SPLIT, BORDERS, groups, depths))
        return all(peaks[d] <= device.memory_bytes for d, device in enumerate(cost.devices))

    found = depths(cost, *wanted)
    possible = any(map(fits, combinations_with_replacement(range(5, 0, -1), 3)))
    assert (found is not None) == possible
    if found is not None:
        assert fits(found)
        assert all(depth <= want for depth, want in zip(found, wanted, strict=True))
        assert found == wanted or not fits(wanted)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([Allocation.SAMPLES, Allocation.MICRO_BATCHES]),
    st.integers(1, 12),
    st.data(),
)
def test_pieces_are_counted_without_listing_them(
    shares: list[int], allocation: Allocation, other: int, data: st.DataObject
) -> None:
    """Shares are samples of a micro-batch, and `other` is how many of these there are, or both
    the other way round."""
    whole = sum(shares)
    micro_batch, count = (whole, other) if allocation is Allocation.SAMPLES else (other, whole)
    last = data.draw(st.integers(1, micro_batch))
    split = BatchSplit((count - 1) * micro_batch + last, micro_batch)
    group = StageGroup(tuple(range(len(shares))), tuple(shares), allocation)
    for place in range(len(shares)):
        listed = Counter(piece for piece in planning_examples.pieces(group, split, place) if piece)
        assert group.piece_counts(split, place) == dict(listed)
