"""Depths that gain nothing are given back; those that gain something stay."""

from __future__ import annotations

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, alone, draft_groups, usual_depths
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.search.auto import with_shallow_warmup
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from tests.support import planning_examples

SPLIT = BatchSplit(16, 1)


def judge_of(link: ClusterLink, devices: int) -> Judge:
    profile = planning_examples.profile([(1.0, 1.0)] * 3, output_bytes=10, activation_bytes=5)
    names = "abc"[:devices]
    cluster = Cluster(
        tuple(ClusterDevice(name, planning_examples.PLENTY, holder=name == "a") for name in names),
        link,
    )
    return Judge(CostModel(profile, cluster, overlap=False), 100_000)


def draft_of(judge: Judge, depths: tuple[int, ...]) -> Draft:
    borders = (0, *range(1, len(depths)), 3)
    groups = [alone(SPLIT, device) for device in range(len(depths))]
    draft = draft_groups(judge.cost, SPLIT, borders, groups, depths)
    assert draft is not None
    assert draft.warmup == depths
    return draft


@pytest.mark.parametrize("depths", [(7,), (16,), (2,)])
def test_a_device_alone_needs_no_depth(depths: tuple[int, ...]) -> None:
    judge = judge_of(planning_examples.FREE, 1)
    best = with_shallow_warmup(judge, judge.exact(draft_of(judge, depths)))
    assert best.draft.warmup == (1,)


@pytest.mark.parametrize("depths", [(16, 16, 16), (9, 6, 1), (16, 3, 1), (4, 2, 1)])
def test_usual_depths_stay_and_deeper_ones_that_gain_nothing_do_not(
    depths: tuple[int, ...],
) -> None:
    judge = judge_of(planning_examples.FREE, 3)
    before = judge.exact(draft_of(judge, depths))
    after = with_shallow_warmup(judge, before)
    usual = usual_depths(before.draft.groups, SPLIT.micro_batches)
    assert after.draft.warmup == tuple(map(min, usual, depths))
    assert after.seconds == pytest.approx(before.seconds, rel=1e-9)


def test_depths_that_hide_a_slow_link_are_lowered_only_as_far_as_it_allows() -> None:
    judge = judge_of(ClusterLink(1e6, 4.0), 3)
    deepest = judge.exact(draft_of(judge, (16, 16, 16)))
    found = with_shallow_warmup(judge, deepest)
    usual = usual_depths(found.draft.groups, SPLIT.micro_batches)
    assert sum(usual) < sum(found.draft.warmup) < 48
    assert judge.exact(draft_of(judge, usual)).seconds > deepest.seconds * 1.01
    assert found.seconds <= deepest.seconds
