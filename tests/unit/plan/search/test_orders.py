"""Orders of stages: where a search begins, what is near, and what its best drafts are."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, UnplacedGroup, peak_bytes
from p2ptrain.plan.problem.candidates import likely_orders
from p2ptrain.plan.problem.judge import Judge
from p2ptrain.plan.problem.order_cuts import OrderCuts
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.orders import OrderSearch, count_placements, every_placement
from p2ptrain.plan.search.pipelines import PipelineSearch
from p2ptrain.plan.simulation.simulate import round_seconds
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanMode
from tests.support.planning_examples import PLENTY, cluster, household, profile

FAST, SLOW = ClusterLink(1e9, 0.0), ClusterLink(1e3, 0.0)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(("units", "devices"), [(1, 20), (2, 20), (3, 20), (4, 4), (5, 3)])
def test_no_more_devices_are_tried_than_there_are_units(
    units: int, devices: int, private: bool
) -> None:
    """Orders of twenty devices are more than can ever be listed."""
    names = [f"device{number}" for number in range(devices)]
    cost = CostModel(profile([(1.0, 1.0)] * units), cluster(*names))
    judge, split = Judge(cost, 1000), BatchSplit(4, 1)
    asked = Question(judge, (split,), tuple(range(devices)), private=private)
    found = list(every_placement(asked))
    assert len(set(found)) == len(found) == count_placements(asked)
    assert all(len(chosen) <= units for _, chosen in found)


def question(model: Profile, members: Cluster, split: BatchSplit) -> Question:
    """Everything allowed."""
    cost = CostModel(model, members)
    return Question(Judge(cost, 10_000), [split], tuple(range(len(cost.devices))))


def drafts_of(asked: Question) -> list[Draft]:
    """What the search for pipelines begins with."""
    search = PipelineSearch.of(asked)
    search.run(None)
    return list(search.pool)


def best(asked: Question) -> Draft:
    """The fastest of them by simulation."""
    return min(drafts_of(asked), key=lambda draft: round_seconds(asked.cost, draft))


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_whole_plans_within_memory(seed: int) -> None:
    model, members = household(seed, units=30, devices=7)
    random = Random(seed)
    tight = tuple(replace(d, memory_bytes=random.randrange(10**7, 10**8)) for d in members.devices)
    asked = question(model, replace(members, devices=tight), BatchSplit(96, 12))
    drafts = drafts_of(asked)
    assert drafts
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
    drafts = drafts_of(replace(asked, groups=False))
    assert drafts
    assert all(draft.is_straight for draft in drafts)


def test_a_stage_stays_within_a_cluster_of_fast_links() -> None:
    names = "abcdef"
    near = {(x, y) for part in ("ace", "bdf") for x in part for y in part if x != y}
    links = {ends: ClusterLink(1e8, 1e-4) for ends in near}
    members = Cluster(tuple(ClusterDevice(n, PLENTY, holder=n == "a") for n in names), SLOW, links)
    asked = question(
        profile([(0.05, 0.1)] * 8, output_bytes=20, parameter_bytes=10**5),
        members,
        BatchSplit(96, 12),
    )
    found = best(asked)
    sets = {frozenset(asked.cost.name(d) for d in g.devices) for g in found.groups}
    assert sets == {frozenset("ace"), frozenset("bdf")}


def test_drafts_do_not_depend_on_the_order_of_listing() -> None:
    model, members = household(3, units=12, devices=9)
    split = BatchSplit(32, 4)
    asked = question(model, members, split)
    other = question(model, replace(members, devices=members.devices[::-1]), split)
    assert drafts_of(asked) == drafts_of(other)


def test_orders_list_a_cluster_whole_before_leaving_it() -> None:
    names = [f"d{i}" for i in range(8)]
    near = {(x, y) for x in names for y in names if x != y and int(x[1]) % 2 == int(y[1]) % 2}
    members = Cluster(
        tuple(ClusterDevice(n, PLENTY, 1 + i, holder=i == 3) for i, n in enumerate(names)),
        SLOW,
        dict.fromkeys(near, FAST),
    )
    orders = likely_orders(CostModel(profile([(1.0, 1.0)]), members), range(8))
    assert (3, 1, 5, 7, 0, 2, 4, 6) in orders
    assert tuple(range(8)) in orders
    assert all(sorted(order) == list(range(8)) for order in orders)


def test_a_search_begins_with_few_of_many_devices_too() -> None:
    model = profile([(0.1, 0.1)] * 12, output_bytes=100, parameter_bytes=1000)
    names = [f"d{i:02}" for i in range(20)]
    search = OrderSearch.of(
        question(model, cluster(*names, link=SLOW), BatchSplit(64, 4)), BatchSplit(64, 4)
    )
    used = {sum(len(part.devices) for part in order) for order in search.starts()}
    assert used >= {1, 2, 8, 16, 20}


def test_a_stage_costs_what_the_cost_model_says() -> None:
    model, members = household(6, units=5, devices=4)
    cost, split = CostModel(model, members), BatchSplit(64, 16)
    cuts = OrderCuts(cost, split)
    for device in range(4):
        tables = cuts.tables(UnplacedGroup((device,)))
        seconds = sum(cost.stage_seconds(device, 2, 4, 16))
        assert tables.latency[2, 4] == tables.seconds[2, 4] == pytest.approx(seconds)
    group = cuts.tables(UnplacedGroup((3, 1, 0)))
    assert group.reduce[1, 3] == pytest.approx(cost.all_reduce_seconds((3, 1, 0), 1, 3))


def test_asynchronous_exchanges_overlap_the_computing_of_later_mini_batches() -> None:
    model = profile([(0.1, 0.1)] * 6, output_bytes=10**3, parameter_bytes=10**8)
    members, split = cluster("a", "b", "c", "d", link=FAST), BatchSplit(32, 1)
    pair = UnplacedGroup((0, 1), Allocation.MICRO_BATCHES)
    found = {
        mode: OrderCuts(CostModel(model, members, mode=mode), split).tables(pair)
        for mode in PlanMode
    }
    # Summing 0.6 GB over two devices takes 0.6 s; computing a micro-batch takes 1.2 s.
    assert found[PlanMode.SYNC].reduce[0, -1] == pytest.approx(0.6)
    assert found[PlanMode.ASYNC].reduce[0, -1] == 0
    for tables in found.values():
        assert tables.latency[0, -1] == pytest.approx(1.2)
        assert tables.seconds[0, -1] == pytest.approx(0.6)
