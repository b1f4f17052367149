"""Tables of stages for all groups: every member has a part, however slow."""

from __future__ import annotations

from dataclasses import replace

from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.search.group_tables import Kind, group_tables
from p2ptrain.plan.shared.rules import Rules
from p2ptrain.plan.split import BatchSplit
from p2ptrain.plan.work import Work
from tests.unit.plan import examples


def test_a_device_a_hundred_times_slower_still_has_a_part() -> None:
    profile = examples.profile([(1.0, 1.0)] * 2, activation_bytes=1)
    fast, slow = examples.cluster("fast", "slow").devices
    cluster = replace(
        examples.cluster("fast", "slow"), devices=(fast, replace(slow, slowdown=100.0))
    )
    cost = CostModel(profile, cluster)
    kinds = [Kind((0, 1)), Kind((0, 1), deals=True)]
    rules = Rules(cost.holder, Work(cost.profile))
    tables = group_tables(cost, BatchSplit(16, 4), kinds, (0, 1, 2), rules)
    assert tables.shares[:, 0, 2].tolist() == [[0.75, 0.25], [0.75, 0.25]]
    assert (tables.load[:, 0, 2] == 4 * 400.0).all()
