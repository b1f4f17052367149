"""Two groups that deal micro-batches, looked at all at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.allocation import Allocation
from p2ptrain.plan.cluster import Cluster
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.draft import peak_bytes
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.search.auto import rules_of
from p2ptrain.plan.search.divider import Divider
from p2ptrain.plan.search.drafting import Drafter
from p2ptrain.plan.search.halves import HALVINGS, SIMULATED, dealt_halves, makespans
from p2ptrain.plan.shared.judge import Judge, Judged
from p2ptrain.plan.shared.question import Question
from p2ptrain.plan.split import BatchSplit
from tests.unit.plan.examples import cluster, household, profile


def question(model: Profile, members: Cluster, batch_size: int = 64) -> Question:
    """Everything allowed, the micro-batch open."""
    cost = CostModel(model, members)
    splits, devices = [BatchSplit(batch_size, 4)], tuple(range(len(cost.devices)))
    return Question(Judge(cost, 10_000), splits, devices, least_piece=1)


def halves(asked: Question) -> list[Judged]:
    return dealt_halves(asked, Drafter(asked.judge, Divider(asked.cost, rules_of(asked))))


@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5),
    st.integers(1, 30),
)
def test_a_group_takes_as_long_as_it_does_when_each_piece_goes_to_who_is_done_first(
    seconds: list[float], count: int
) -> None:
    dealt = [0] * len(seconds)
    for _ in range(count):
        ends = [(n + 1) * each for n, each in zip(dealt, seconds, strict=True)]
        dealt[ends.index(min(ends))] += 1
    least = max(n * each for n, each in zip(dealt, seconds, strict=True))
    members = np.ones((1, len(seconds)), dtype=np.int64)
    (found,) = makespans(members, np.array([seconds]).T, count)[0]
    assert found == pytest.approx(least, rel=1e-9, abs=1.001 * max(seconds) / 2**HALVINGS)


def test_other_devices_do_not_count() -> None:
    members, seconds = np.array([[1, 0], [0, 1]]), np.array([[1.0, 2.0], [10.0, 20.0]])
    found = makespans(members, seconds, 3)
    assert found == pytest.approx(np.array([[3.0, 6.0], [30.0, 60.0]]), rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_all_devices_are_in_two_stages_that_memory_holds(seed: int) -> None:
    model, members = household(seed, units=12, devices=5)
    asked = question(model, members)
    found = halves(asked)
    assert 0 < len(found) <= SIMULATED
    for judged in found:
        draft = judged.draft
        assert judged.seconds == asked.judge.seconds(draft)
        assert len(draft.groups) == 2
        assert sorted(draft.devices) == list(asked.devices)
        assert all(group.deals or len(group.devices) == 1 for group in draft.groups)
        for device, peak in peak_bytes(asked.cost, draft).items():
            assert peak <= asked.cost.devices[device].memory_bytes


def test_the_number_of_micro_batches_suits_the_speeds() -> None:
    """Two pairs of 3 : 1: only multiples of four leave nobody idle."""
    model = profile([(0.1, 0.1)] * 2, output_bytes=1, parameter_bytes=1)
    fast = cluster("a", "b", "c", "d")
    slow = [replace(d, slowdown=3.0) if d.name in "bd" else d for d in fast.devices]
    asked = question(model, replace(fast, devices=tuple(slow)), 48)
    best = min(halves(asked), key=lambda judged: judged.seconds).draft
    assert best.split.micro_batches % 4 == 0
    assert [sorted(group.shares) for group in best.groups] == [
        [best.split.micro_batches // 4, 3 * best.split.micro_batches // 4]
    ] * 2


def test_equal_devices_are_not_told_apart() -> None:
    model = profile([(0.1, 0.1)] * 3, output_bytes=1, parameter_bytes=1)
    found = halves(question(model, cluster("a", "b", "c", "d", "e")))
    signs = [
        (j.draft.split, j.draft.borders, len(j.draft.groups[0].devices), j.draft.warmup)
        for j in found
    ]
    assert len(set(signs)) == len(signs)


@pytest.mark.parametrize(
    "forbidding",
    [
        {"least_piece": None},
        {"groups": False},
        {"private": True},
        {"allocations": frozenset({Allocation.SAMPLES})},
    ],
)
def test_there_are_none_where_the_question_forbids_them(forbidding: dict[str, Any]) -> None:
    model = profile([(0.1, 0.1)] * 3, output_bytes=1, parameter_bytes=1)
    asked = question(model, cluster("a", "b", "c", "d"))
    assert halves(asked)
    assert halves(replace(asked, **forbidding)) == []


@pytest.mark.parametrize(("units", "devices"), [(1, 4), (3, 2), (3, 9)])
def test_there_are_none_of_one_unit_two_devices_or_many(units: int, devices: int) -> None:
    model = profile([(0.1, 0.1)] * units, output_bytes=1, parameter_bytes=1)
    assert halves(question(model, cluster(*"abcdefghi"[:devices]))) == []
