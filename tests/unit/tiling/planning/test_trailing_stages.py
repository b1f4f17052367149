"""When planners let several devices share what is behind the tiles, and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import EVERY_ALLOCATION, Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.plan import Plan
from p2ptrain.tiling.planning.make_plan import make_plan
from p2ptrain.tiling.planning.pipelined_tiling import MAX_SHARING, TrailingStages, best_pipelined
from p2ptrain.tiling.planning.tiled_plan import round_of, simulate_plan
from p2ptrain.tiling.planning.tiling_setting import TilingRequest, TilingSetting
from tests.unit.tiling.planning.test_tiled_plan import FAST_LINK, asked, cluster, profile

DEALING, DIVIDING = Allocation.MICRO_BATCHES, Allocation.SAMPLES
LONG = profile(tail=4.0, maps=True)
"""As long as the four convolutions."""
SIX = cluster(*[1.0] * 6)


def plan_of(devices: Cluster = SIX, tail: float = 4.0, **changed: object) -> Plan:
    return make_plan(profile(tail=tail, maps=True), devices, asked(batch_size=8, **changed))


def sharing(plan: Plan) -> int:
    """How many devices share the stage behind the tiles."""
    return len(plan.stages[1].devices)


@pytest.mark.parametrize("micro_batch", [None, 1, 2, 8])
def test_several_share_a_long_rest(micro_batch: int | None) -> None:
    plan = plan_of(micro_batch=micro_batch)
    first, behind = plan.stages
    assert sharing(plan) in (3, 4)
    assert len(first.devices) + sharing(plan) == 6
    alone = 8 * 3 * (4 + 4.0)
    assert alone / 6 < plan.predicted.round_seconds < 1.7 * alone / 6
    assert Plan.from_json(plan.to_json()) == plan
    found = simulate_plan(plan, LONG, SIX)
    assert found.round_seconds == plan.predicted.round_seconds
    assert found.peak_bytes == plan.predicted.peak_bytes
    shares = sum(device.share for device in behind.devices)
    whole = plan.micro_batch if behind.allocation is DIVIDING else plan.micro_batches
    assert shares == whole


def test_nobody_shares_a_short_rest() -> None:
    for micro_batch in (1, 8):
        assert sharing(plan_of(tail=0.01, micro_batch=micro_batch)) == 1


def test_nobody_shares_behind_links_that_carry_nothing() -> None:
    """Filters of the rest would have to be summed."""
    heavy = profile(tail=4.0, maps=True)
    units = (*heavy.units[:-1], replace(heavy.units[-1], parameter_bytes=10**9))
    slow = replace(SIX, default_link=ClusterLink(5e6, 1e-5))
    request = asked(batch_size=8, micro_batch=2)
    roomy = replace(slow, devices=tuple(replace(d, memory_bytes=1 << 40) for d in slow.devices))
    assert sharing(make_plan(replace(heavy, units=units), roomy, request)) == 1
    assert sharing(make_plan(heavy, roomy, request)) > 1


@pytest.mark.parametrize("way", [DEALING, DIVIDING])
def test_they_share_only_as_is_allowed(way: Allocation) -> None:
    plan = plan_of(micro_batch=2, allocations=frozenset({way}))
    assert sharing(plan) > 1
    assert plan.stages[1].allocation is way


@pytest.mark.parametrize(("micro_batch", "way"), [(3, DEALING), (4, DIVIDING)])
def test_the_way_that_divides_evenly_is_taken(micro_batch: int, way: Allocation) -> None:
    """Four micro-batches of three samples on two devices, or three of four."""
    request = asked(batch_size=12, micro_batch=micro_batch)
    net = profile(tail=4.0, maps=True)
    behind = make_plan(net, cluster(*[1.0] * 4), request).stages[1]
    assert behind.allocation is way
    assert [device.share for device in behind.devices] == [2, 2]


def test_a_single_micro_batch_is_not_dealt() -> None:
    assert sharing(plan_of(micro_batch=8, allocations=frozenset({DEALING}))) == 1
    with_samples = plan_of(micro_batch=8, allocations=frozenset({DIVIDING}))
    assert sharing(with_samples) > 1
    assert with_samples.stages[1].allocation is DIVIDING


def test_faster_devices_have_more() -> None:
    behind = plan_of(cluster(1.0, 3.0, 1.0, 3.0, 1.0, 1.0), micro_batch=1).stages[1]
    shares = {device.name: device.share for device in behind.devices}
    slow = [shares[name] for name in ("d1", "d3") if name in shares]
    fast = [shares[name] for name in shares if name not in ("d1", "d3")]
    assert max([*slow, 0]) <= min([*fast, 9])


def test_devices_that_hold_no_activations_of_the_rest_share_it_by_samples() -> None:
    """One alone has no room for a micro-batch of what is behind."""
    roomy = profile(tail=4.0, maps=True)
    units = (*roomy.units[:-1], replace(roomy.units[-1], activation_bytes=10**8))
    net = replace(roomy, units=units)
    devices = cluster(*[1.0] * 5, memory_bytes=5 * 10**8)
    plan = make_plan(net, devices, asked(batch_size=8, micro_batch=8))
    assert sharing(plan) > 1
    assert plan.stages[1].allocation is DIVIDING
    assert max(plan.predicted.peak_bytes.values()) <= 5 * 10**8


@pytest.mark.parametrize("slowdowns", [(1.0,) * 6, (2.0, 1.0, 3.0, 1.5, 1.0)])
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_what_the_search_judged_is_what_the_plan_predicts(
    slowdowns: tuple[float, ...], micro_batch: int
) -> None:
    devices, split = cluster(*slowdowns), BatchSplit(8, micro_batch)
    cost = CostModel(LONG, devices)
    assert LONG.maps is not None
    setting = TilingSetting.of(cost, LONG.maps.first_units(4), split, range(len(slowdowns)))
    pieces = 8 / split.first_samples
    found = best_pipelined(setting, TilingRequest(every=True, pieces=pieces))
    assert found is not None
    assert found.seconds >= found.bound
    plan = make_plan(LONG, devices, asked(batch_size=8, micro_batch=micro_batch))
    assert round_of(cost, plan).round_seconds == pytest.approx(found.seconds)
    without = best_pipelined(
        setting, TilingRequest(every=True, pieces=pieces, allocations=frozenset())
    )
    assert without is None or found.seconds < without.seconds


def test_auto_takes_it_only_where_it_is_faster() -> None:
    """Two samples in one micro-batch: tiles for the convolutions, and the rest for two devices."""
    request = asked(planner="auto", batch_size=2, micro_batch=2, effort=0.05)
    net = profile(tail=2.0, maps=True)
    plan = make_plan(net, cluster(*[1.0] * 6, link=FAST_LINK), request)
    assert plan.found_by == "tiles"
    assert sharing(plan) == 2
    bare = profile(tail=2.0, spatial=False)
    without = make_plan(bare, SIX, request)
    assert plan.predicted.round_seconds < without.predicted.round_seconds
    slow = replace(SIX, default_link=ClusterLink(1e4, 0.1))
    assert make_plan(net, slow, request).stages == make_plan(bare, slow, request).stages


def followers(count: int, split: BatchSplit, ways: frozenset[Allocation]) -> TrailingStages:
    cost = CostModel(LONG, cluster(*[1.0] * 8))
    return TrailingStages(cost, split, tuple(range(count)), ways)


@pytest.mark.parametrize(
    ("count", "split", "ways", "expected"),
    [
        (1, BatchSplit(8, 1), EVERY_ALLOCATION, [1]),
        (2, BatchSplit(8, 2), EVERY_ALLOCATION, [1, 2, 2]),
        (2, BatchSplit(8, 8), EVERY_ALLOCATION, [2]),
        (3, BatchSplit(8, 2), EVERY_ALLOCATION, [3]),
        (3, BatchSplit(8, 2), frozenset(), []),
        (1, BatchSplit(8, 8), EVERY_ALLOCATION, []),
        (MAX_SHARING + 1, BatchSplit(64, 8), EVERY_ALLOCATION, []),
    ],
)
def test_what_may_follow(
    count: int, split: BatchSplit, ways: frozenset[Allocation], expected: list[int]
) -> None:
    """By devices of the first stage: a pipeline, then by samples, then in turn."""
    asked_of = followers(count, split, ways)
    assert [len(row.groups[0].devices) for row in asked_of.rows(3)] == expected
    assert asked_of.are_worth_asking is bool(expected)
    used = [{d for group in row.groups for d in group.devices} for row in asked_of.rows(3)]
    assert all(devices == set(range(count)) for devices in used)
