"""Several devices share what is behind the tiles, where planners find that faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from p2ptrain.coordinator import plan_cluster
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.plan.types.allocation import Allocation
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.integration.training.household import devices
from tests.integration.training.test_tiles import TOLERANCE, Net, job, trained
from tests.support.curves import by_plain_torch, difference


def long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let planners believe that devices are alike, and what cannot be tiled takes most of a round.

    Samples take seconds, so that messages and links take nothing beside them.
    """

    def plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        assert profile.maps is not None
        tiled = len(profile.maps.units)
        each = tuple(1.0 if k < tiled else 10.0 for k in range(len(profile.units)))
        times = TimeTable((1,), (UnitTimes(each, each, (0.0,) * len(each)),))
        alike = tuple(replace(d, slowdown=1.0, times=None, overheads=None) for d in cluster.devices)
        return make_plan(replace(profile, times=times), replace(cluster, devices=alike), request)

    monkeypatch.setattr(plan_cluster, "make_plan", plan)


def normalised() -> Job:
    """With statistics over samples behind the tiles as well."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Net()
        model.head = nn.Sequential(  # type: ignore[assignment]
            nn.Linear(8 * 4 * 5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)
        )
    return replace(job(), model=model.double())


def without_statistics() -> Job:
    """So that samples may be divided; a mini-batch is one micro-batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Net()
        model.one[1], model.three[1] = nn.Identity(), nn.Identity()
    return replace(job(micro_batch=8), model=model.double())


SHARED = {
    "statistics in tiles": (job, Allocation.MICRO_BATCHES),
    "and behind them": (normalised, Allocation.MICRO_BATCHES),
    "none": (without_statistics, Allocation.SAMPLES),
}


@pytest.mark.parametrize("case", SHARED)
async def test_planners_share_a_long_rest(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Such a plan is found, not forced; whole micro-batches where units look across samples."""
    long_rest(monkeypatch)
    made, way = SHARED[case]
    what = made()
    options = TrainOptions(wait_for=4, steps=6, planner="tiles")
    async with devices(4) as household:
        ours = await trained(household, what, 6, options)
        first, behind = household.plan.stages
    assert (first.allocation, behind.allocation) == (Allocation.TILES, way)
    assert (len(first.devices), len(behind.devices)) == (2, 2)
    found = difference(ours, by_plain_torch(made(), 6))
    assert found.loss < TOLERANCE
    assert found.state < TOLERANCE
