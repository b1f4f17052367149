"""A pipeline behind tiles: what its mini-batch takes, and when planners choose one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.coordinator.plan_expectations import round_work
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning.make_plan import make_plan
from p2ptrain.tiling.planning.pipelined_tiling import best_pipelined
from p2ptrain.tiling.planning.tiled_pipeline import (
    Passes,
    TrailingPipeline,
    depths_that_fit,
    pipeline_seconds,
)
from p2ptrain.tiling.planning.tiled_plan import round_of
from p2ptrain.tiling.planning.tiling_problem import Passage
from p2ptrain.tiling.planning.tiling_search import best_tiling
from p2ptrain.tiling.planning.tiling_setting import SharedRest, TilingRequest, TilingSetting
from tests.unit.tiling.planning.test_tiled_plan import asked, cluster, profile

FREE = ClusterLink(1e18, 0.0)
SPLIT = BatchSplit(4, 1)


def cost_of(units: int, *, kept_bytes: int = 0, memory_bytes: int = 1 << 30) -> CostModel:
    """Units of a tick forward and one back, links that take no time; a cut is 1 MB."""
    each = (1.0,) * units
    found = tuple(Unit(f"unit{k}", 0, 10**6, kept_bytes, 1) for k in range(units))
    times = TimeTable((1,), (UnitTimes(each, each, (0.0,) * units),))
    devices = tuple(ClusterDevice(f"d{k}", memory_bytes, 1.0, holder=k == 0) for k in range(4))
    return CostModel(Profile("net", 4, 8, found, 0.0, times), Cluster(devices, FREE))


def passes(
    forward: float, backward: float, entering: float, leaving: float, filters: float
) -> Passes:
    """Of tiles on devices 0 and 1; what leaves comes back in the same time."""
    into, out = (Passage(((1, seconds),), 0.0) for seconds in (entering, leaving))
    return Passes(forward, backward, into, (out,), (out,), filters, frozenset((0, 1)))


def test_a_stage_works_while_the_tiles_are_at_the_next_micro_batch() -> None:
    """
    tiles    F0 F1 F2 B0 F3 B1 .  B2 .  B3 sum
    stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3
    """
    tick = passes(1.0, 1.0, 0.0, 0.0, 1.0)
    assert (
        pipeline_seconds(
            cost_of(2), SPLIT, tick, TrailingPipeline.straight(SPLIT, (1, 2), (3,)), (3, 1)
        )
        == 11.0
    )


def test_each_depth_counts() -> None:
    """
    tiles    F0 .  .  B0 F1 .  .  B1 F2 .  .  B2 F3 .  .  B3 sum
    stage 1  .  F0 B0 .  .  F1 B1 .  .  F2 B2 .  .  F3 B3
    """
    tick = passes(1.0, 1.0, 0.0, 0.0, 1.0)
    assert (
        pipeline_seconds(
            cost_of(2), SPLIT, tick, TrailingPipeline.straight(SPLIT, (1, 2), (3,)), (1, 1)
        )
        == 17.0
    )


def test_what_crosses_takes_its_time() -> None:
    """The images, the last maps there and back; then a cut between two stages."""
    some = passes(0.0, 0.0, 0.5, 2.0, 0.0)
    row = TrailingPipeline.straight(SPLIT, (1, 2, 3), (2, 3))
    one = BatchSplit(1, 1)
    taken = pipeline_seconds(cost_of(3), one, some, row, (1, 1, 1))
    assert taken == pytest.approx(0.5 + 2.0 + 4.0 + 2.0)
    slow = cost_of(3)
    linked = CostModel(slow.profile, Cluster(slow.devices, ClusterLink(1e6, 0.25)))
    assert pipeline_seconds(linked, one, some, row, (1, 1, 1)) == pytest.approx(taken + 2 * 1.25)


def test_memory_lowers_depths_and_those_of_all_behind() -> None:
    tight = cost_of(3, kept_bytes=10, memory_bytes=20)
    row = TrailingPipeline.straight(SPLIT, (1, 2, 3), (2, 3))
    assert depths_that_fit(tight, SPLIT, row, 4) == (4, 2, 1)
    assert depths_that_fit(tight, SPLIT, row, 1) == (1, 1, 1)
    assert depths_that_fit(tight, SPLIT, row, 0) is None
    assert depths_that_fit(cost_of(3, kept_bytes=30, memory_bytes=20), SPLIT, row, 4) is None


def test_it_is_chosen_where_the_rest_is_long_and_there_are_several_micro_batches() -> None:
    devices = cluster(1.0, 1.0, 1.0, 1.0)
    long = profile(tail=1.0)
    plan = make_plan(long, devices, asked(batch_size=8, micro_batch=1))
    names = [{device.name for device in stage.devices} for stage in plan.stages]
    assert len(names[0]) == 3
    assert names[1].isdisjoint(names[0])
    assert plan.left_out == ()
    alone = 8 * 3 * (4 + 1.0)
    assert alone / 4 < plan.predicted.round_seconds < 1.25 * alone / 4
    assert shared_ends(make_plan(long, devices, asked(batch_size=8, micro_batch=8)))
    assert shared_ends(make_plan(profile(tail=0.01), devices, asked(batch_size=8, micro_batch=4)))


def shared_ends(plan: Plan) -> bool:
    """Whether a device with tiles has the rest."""
    first, behind = plan.stages
    return behind.devices[0].name in {device.name for device in first.devices}


def test_who_can_have_one_of_the_tiles_asked_for_has_one() -> None:
    long, devices = profile(tail=1.0), cluster(1.0, 1.0, 1.0, 1.0)
    whole = asked(batch_size=8, micro_batch=1, grid=(2, 2))
    assert len(make_plan(long, devices, whole).stages[0].devices) == 4
    few = make_plan(long, devices, replace(whole, grid=(1, 2)))
    assert [len(few.stages[0].devices), len(few.stages)] == [2, 3]


@pytest.mark.parametrize("slowdowns", [(1.0,) * 5, (2.0, 1.0, 3.0, 1.5)])
def test_what_the_search_judged_is_what_the_plan_predicts(slowdowns: tuple[float, ...]) -> None:
    net, devices = profile(tail=1.2, maps=True), cluster(*slowdowns)
    plan = make_plan(net, devices, asked(batch_size=8, micro_batch=2))
    cost, split = CostModel(net, devices), BatchSplit(8, 2)
    network = net.maps
    assert network is not None
    used = tuple(range(len(slowdowns)))
    setting = TilingSetting.of(cost, network.first_units(4), split, used)
    question = TilingRequest(every=True, pieces=4)
    found = best_pipelined(setting, question)
    assert found is not None
    assert round_of(cost, plan).round_seconds == pytest.approx(found.seconds)
    shared = best_tiling(
        *(setting.problem, setting.tile_devices(), question, SharedRest(setting)),
        setting.tile_device(0),
    )
    assert found.seconds < shared.seconds


def test_a_devices_work_is_what_it_computes() -> None:
    net, devices = profile(tail=1.2, maps=True), cluster(1.0, 2.0, 1.0)
    for micro_batch in (2, 8):
        plan = make_plan(net, devices, asked(batch_size=8, micro_batch=micro_batch))
        cost = CostModel(net, devices)
        busy = dict.fromkeys(range(3), 0.0)
        for (_, device), work in round_work(cost, plan).items():
            busy[device] += work.computing
            assert work.messages >= 0.0
        found = round_of(cost, plan).busy_seconds
        assert found == pytest.approx({cost.name(d): seconds for d, seconds in busy.items()})


def test_tiles_keep_as_many_micro_batches_as_they_are_deep() -> None:
    net = profile(tail=1.0)
    plan = make_plan(net, cluster(1.0, 1.0, 1.0), asked(batch_size=8, micro_batch=1))
    cost = CostModel(net, cluster(1.0, 1.0, 1.0))
    first = replace(plan.stages[0], warmup=1)
    flat = replace(plan, stages=(first, *plan.stages[1:]))
    for device in first.devices:
        deep = round_of(cost, plan).peak_bytes[device.name]
        assert deep > 2 * round_of(cost, flat).peak_bytes[device.name]
