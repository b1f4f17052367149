"""A slow replica that takes its turn sets the pace of steady running."""

from __future__ import annotations

import pytest

from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.request import PlanMode
from tests.support import planning_examples


def test_equal_turns_go_at_the_slowest_replicas_pace() -> None:
    devices = (
        ClusterDevice("fast", planning_examples.PLENTY, 1.0, holder=True),
        ClusterDevice("slow", planning_examples.PLENTY, 30.0),
    )
    turns = tuple(DeviceShare(device.name, 2) for device in devices)
    stage = PlannedStage((0, 1), turns, 2, Allocation.MICRO_BATCHES)
    nothing = Predicted(0.0, 0.0, {})
    plan = Plan("hand", BatchSplit(4, 1), (stage,), nothing, mode=PlanMode.ASYNC)
    cluster = Cluster(devices, ClusterLink(1e9, 0.0))
    steady = simulate(plan, planning_examples.profile([(1.0, 2.0)]), cluster)
    assert steady.round_seconds == pytest.approx(30 * 3 / 2, rel=0.05)
