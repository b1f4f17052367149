"""Candidates of groups along orders of the devices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, peak_bytes
from p2ptrain.plan.problem.candidates import segment_orders
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.segment_tables import SegmentTables, group_options
from p2ptrain.plan.search.segments import segment_candidates
from p2ptrain.plan.simulation.simulate import round_seconds
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode
from tests.support.planning_examples import PLENTY, cluster, household, profile

FAST, SLOW = ClusterLink(1e9, 0.0), ClusterLink(1e3, 0.0)


def question(model: Profile, members: Cluster, split: BatchSplit) -> Question:
    """Everything allowed."""
    cost = CostModel(model, members)
    return Question(Judge(cost, 10_000), [split], tuple(range(len(cost.devices))))


def best(asked: Question) -> Draft:
    """The fastest candidate by simulation."""
    drafts = segment_candidates(asked, asked.splits[0])
    return min(drafts, key=lambda draft: round_seconds(asked.cost, draft))


@pytest.mark.parametrize("seed", range(6))
def test_candidates_are_whole_plans_within_memory(seed: int) -> None:
    model, members = household(seed, units=30, devices=7)
    random = Random(seed)
    tight = tuple(replace(d, memory_bytes=random.randrange(10**7, 10**8)) for d in members.devices)
    asked = question(model, replace(members, devices=tight), BatchSplit(96, 12))
    drafts = list(segment_candidates(asked, asked.splits[0]))
    assert drafts
    assert len(set(drafts)) == len(drafts)
    for draft in drafts:
        assert draft.borders[0] == 0
        assert draft.borders[-1] == 30
        assert all(first < end for first, end in draft.units)
        assert len(set(draft.devices)) == len(draft.devices)
        for device, peak in peak_bytes(asked.cost, draft).items():
            assert peak <= asked.cost.devices[device].memory_bytes
        for group in draft.groups:
            assert sum(group.shares) == (8 if group.deals else 12)


def test_a_small_model_on_fast_links_is_data_parallel() -> None:
    model = profile([(0.1, 0.1)] * 6, output_bytes=10**6, parameter_bytes=10)
    found = best(question(model, cluster("a", "b", "c", "d", link=FAST), BatchSplit(64, 64)))
    assert [len(group.devices) for group in found.groups] == [4]


def test_large_parameters_on_slow_links_are_a_straight_pipeline() -> None:
    model = profile([(0.1, 0.1)] * 8, output_bytes=1, parameter_bytes=10**6)
    found = best(question(model, cluster("a", "b", "c", "d", link=SLOW), BatchSplit(64, 4)))
    assert [len(group.devices) for group in found.groups] == [1, 1, 1, 1]
    assert found.borders == (0, 2, 4, 6, 8)


def test_without_groups_every_stage_is_one_device() -> None:
    model = profile([(0.1, 0.1)] * 6, parameter_bytes=10)
    asked = question(model, cluster("a", "b", "c", link=FAST), BatchSplit(64, 64))
    drafts = list(segment_candidates(replace(asked, groups=False), asked.splits[0]))
    assert drafts
    assert all(draft.is_straight for draft in drafts)


def test_a_stage_stays_within_a_cluster_of_fast_links() -> None:
    names = "abcdef"
    near = {(x, y) for part in ("ace", "bdf") for x in part for y in part if x != y}
    links = {ends: ClusterLink(1e8, 1e-4) for ends in near}
    members = Cluster(tuple(ClusterDevice(n, PLENTY, holder=n == "a") for n in names), SLOW, links)
    cost_question = question(
        profile([(0.05, 0.1)] * 8, output_bytes=20, parameter_bytes=10**5),
        members,
        BatchSplit(96, 12),
    )
    found = best(cost_question)
    sets = {frozenset(cost_question.cost.name(d) for d in g.devices) for g in found.groups}
    assert sets == {frozenset("ace"), frozenset("bdf")}


def test_candidates_do_not_depend_on_the_order_of_listing() -> None:
    model, members = household(3, units=12, devices=9)
    split = BatchSplit(32, 4)
    asked = question(model, members, split)
    other = question(model, replace(members, devices=members.devices[::-1]), split)
    assert list(segment_candidates(asked, split)) == list(segment_candidates(other, split))


def test_the_worst_link_of_every_window() -> None:
    model, members = household(5, units=4, devices=8)
    cost, split = CostModel(model, members), BatchSplit(64, 8)
    order = [3, 1, 4, 0, 5, 7, 2, 6]
    options = group_options(8, split, EVERY_ALLOCATION)
    tables = SegmentTables(cost, split, order, range(5), options)
    reduce = tables.stages(1).reduce  # units from 1 on
    for o, option in enumerate(options):
        for k in range(8 - option.size + 1):
            seconds = cost.all_reduce_seconds(order[k : k + option.size], 1, 3)
            assert reduce[1, o, k] == pytest.approx(seconds)


def test_single_stages_cost_what_the_cost_model_says() -> None:
    model, members = household(6, units=5, devices=4)
    cost, split = CostModel(model, members), BatchSplit(64, 16)
    options = group_options(4, split, EVERY_ALLOCATION)
    stages = SegmentTables(cost, split, range(4), range(6), options).stages(2)
    for k in range(4):
        seconds = sum(cost.stage_seconds(k, 2, 4, 16))
        assert stages.latency[1, 0, k] == pytest.approx(seconds)
        assert stages.work[1, 0, k] == pytest.approx(4 * seconds)
    assert np.isinf(stages.latency[:, -1, 2:]).all()  # groups end with the order


def test_orders_list_a_cluster_whole_before_leaving_it() -> None:
    names = [f"d{i}" for i in range(8)]
    near = {(x, y) for x in names for y in names if x != y and int(x[1]) % 2 == int(y[1]) % 2}
    members = Cluster(
        tuple(ClusterDevice(n, PLENTY, 1 + i, holder=i == 3) for i, n in enumerate(names)),
        SLOW,
        dict.fromkeys(near, FAST),
    )
    orders = segment_orders(CostModel(profile([(1.0, 1.0)]), members), range(8), 8)
    assert (3, 1, 5, 7, 0, 2, 4, 6) in orders
    assert tuple(range(8)) in orders
    assert all(sorted(order) == list(range(8)) for order in orders)


def test_an_order_cut_short_keeps_the_holder() -> None:
    names = [f"d{i}" for i in range(6)]
    members = Cluster(
        tuple(ClusterDevice(n, PLENTY, 1 + i, holder=i == 5) for i, n in enumerate(names)), FAST
    )
    for order in segment_orders(CostModel(profile([(1.0, 1.0)]), members), range(6), 3):
        assert sorted(order) == [0, 1, 5]


def test_pipelines_of_few_devices_are_candidates_among_many() -> None:
    model = profile([(0.1, 0.1)] * 12, output_bytes=100, parameter_bytes=1000)
    names = [f"d{i:02}" for i in range(20)]
    asked = question(model, cluster(*names, link=SLOW), BatchSplit(64, 4))
    few = question(model, cluster(*names[:8], link=SLOW), BatchSplit(64, 4))
    first = next(segment_candidates(few, few.splits[0]))
    assert first in set(segment_candidates(asked, asked.splits[0]))


def test_asynchronous_exchanges_overlap_the_computing_of_later_mini_batches() -> None:
    model = profile([(0.1, 0.1)] * 6, output_bytes=10**3, parameter_bytes=10**8)
    members, split = cluster("a", "b", "c", "d", link=FAST), BatchSplit(32, 1)
    options = group_options(4, split, EVERY_ALLOCATION)
    pair = next(i for i, option in enumerate(options) if option.size == 2 and option.deals)
    stages = {
        mode: SegmentTables(
            CostModel(model, members, mode=mode), split, range(4), range(7), options
        ).stages(0)
        for mode in PlanMode
    }
    # Summing 0.6 GB over two devices takes 0.6 s; computing a micro-batch takes 1.2 s.
    assert stages[PlanMode.SYNC].reduce[-1, pair, 0] == pytest.approx(0.6)
    assert stages[PlanMode.SYNC].work[-1, pair, 0] == pytest.approx(16 * 1.2)
    assert stages[PlanMode.ASYNC].reduce[-1, pair, 0] == 0
    assert stages[PlanMode.ASYNC].work[-1, pair, 0] == pytest.approx(16 * max(0.6, 1.2))
