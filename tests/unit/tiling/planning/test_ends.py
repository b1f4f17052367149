"""What goes in and out of tiles uses links of its own; who has the rest may not be the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from p2ptrain.coordinator.plan_expectations import round_work
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.types.allocation import Allocation, BatchSplit, TileShape
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, LeftOut, Plan, PlannedStage, Predicted
from p2ptrain.plan.types.profile import Profile
from p2ptrain.tiling.planning.make_plan import make_plan
from p2ptrain.tiling.planning.tiled_plan import costs_of, round_of
from p2ptrain.tiling.planning.tiling_problem import TileLinks
from tests.unit.tiling.planning.test_tiled_plan import (
    CHANNELS,
    SIZE,
    UNITS,
    asked,
    cluster,
    profile,
)

FAST = ClusterLink(1.25e8, 1e-4)
WIFI = ClusterLink(1e6, 5e-3)
MAP_BYTES = CHANNELS * SIZE * SIZE * 4
IMAGE_BYTES = 3 * SIZE * SIZE * 4
SLACK = 0.05
"""What messages cost the processors, about."""


def house(count: int, links: Mapping[tuple[str, str], ClusterLink]) -> Cluster:
    return replace(cluster(*[1.0] * count, link=FAST), links=dict(links))


def tiled(
    tiles: Sequence[str],
    behind: Sequence[str],
    split: BatchSplit,
    *,
    out: Sequence[str] = (),
    depths: Sequence[int] = (1, 1),
) -> Plan:
    """Tiles side by side, a group a unit; of the rest the last stage has the loss alone."""
    borders = tuple(range(UNITS - len(behind) + 1))
    shape = TileShape((1.0,), (1.0,) * len(tiles), borders, True, ())
    first = tuple(DeviceShare(name, 1) for name in tiles)
    stages = [PlannedStage((0, borders[-1]), first, depths[0], Allocation.TILES, tiling=shape)]
    for k, (name, depth) in enumerate(zip(behind, depths[1:], strict=True)):
        units = borders[-1] + k, borders[-1] + k + 1
        stages.append(PlannedStage(units, (DeviceShare(name, split.micro_batch),), depth))
    left = tuple(LeftOut(name, "") for name in out)
    return Plan("tiles", split, tuple(stages), Predicted(0.0, 0.0, {}), left)


def seconds(plan: Plan, devices: Cluster, net: Profile | None = None) -> float:
    return round_of(CostModel(net or profile(), devices), plan).round_seconds


ONE = BatchSplit(1, 1)


@pytest.mark.parametrize("end", ["from", "to"])
def test_the_stage_behind_has_links_of_its_own(end: str) -> None:
    """Two devices with tiles on Gigabit, and the rest on one that is on Wi-Fi, this or that way."""
    plan = tiled(("d0", "d1"), ("d2",), ONE)
    pairs = [("d2", d) if end == "from" else (d, "d2") for d in ("d0", "d1")]
    slow = house(3, dict.fromkeys(pairs, WIFI))
    more = seconds(plan, slow) - seconds(plan, house(3, {}))
    assert more == pytest.approx(MAP_BYTES / WIFI.bytes_per_s + WIFI.latency_s, rel=SLACK)


def test_a_holder_without_tiles_has_links_of_its_own() -> None:
    plan = tiled(("d1", "d2"), ("d1",), ONE, out=("d0",))
    slow = house(3, {("d0", "d1"): WIFI, ("d0", "d2"): WIFI})
    more = seconds(plan, slow) - seconds(plan, house(3, {}))
    assert more == pytest.approx(IMAGE_BYTES / WIFI.bytes_per_s + WIFI.latency_s, rel=SLACK)


def test_filters_are_summed_over_the_slowest_pair() -> None:
    """One of twelve directions is slow. What was measured may be wrong once, what is asked not."""
    plan = tiled(("d0", "d1", "d2", "d3"), ("d0",), ONE)
    devices = house(4, {("d1", "d2"): WIFI})
    size = sum(unit.parameter_bytes for unit in profile().units[: UNITS - 1])
    found = costs_of(CostModel(profile(), devices), plan)[0].filter_seconds
    assert found == pytest.approx(2 * 3 * (size / (4 * WIFI.bytes_per_s) + WIFI.latency_s))
    measured = costs_of(CostModel(profile(), devices, overlap=True), plan)[0]
    assert measured.problem.link == FAST


def test_who_has_no_tile_slows_down_no_tiles() -> None:
    """`auto` compares two devices on Gigabit without the third, whose links are slow."""
    far = ClusterLink(1e4, 1.0)
    slow = {pair: far for d in ("d0", "d1") for pair in (("d2", d), (d, "d2"))}
    plan = make_plan(profile(), house(3, slow), asked(planner="auto"))
    assert plan.found_by == "tiles"
    assert {device.name for device in plan.stages[0].devices} == {"d0", "d1"}
    two = make_plan(profile(), house(2, {}), asked(planner="auto"))
    assert plan.predicted.round_seconds == pytest.approx(two.predicted.round_seconds)


def test_targets_travel_to_the_last_stage() -> None:
    large = replace(profile(), target_bytes=20_000_000)
    devices = house(3, {("d0", "d2"): WIFI})
    elsewhere = tiled(("d0", "d1"), ("d2",), ONE)
    sent = large.target_bytes / WIFI.bytes_per_s
    assert seconds(elsewhere, devices, large) > sent > 2 * seconds(elsewhere, devices)
    own = tiled(("d0", "d1"), ("d0",), ONE, out=("d2",))
    assert seconds(own, devices, large) == seconds(own, devices)


def test_images_and_what_the_holder_sends_behind_share_its_uplink() -> None:
    """The holder computes behind the tiles: its gradients wait where images are still sent."""
    plan = tiled(("d1", "d2"), ("d0",), BatchSplit(4, 1), depths=(3, 1))
    large = replace(profile(tail=0.001), input_bytes=3_000_000)
    slow = house(3, {("d0", d): WIFI for d in ("d1", "d2")})
    sent = 4 * (MAP_BYTES + IMAGE_BYTES) / WIFI.bytes_per_s
    quick = replace(large, times=large.times.times_slowdown(1e-6))
    assert seconds(plan, slow, quick) > sent


@pytest.mark.parametrize("behind", ["d0", "d2"])
def test_a_smaller_last_micro_batch_takes_less(behind: str) -> None:
    out = () if behind == "d2" else ("d2",)
    devices, even, odd = house(3, {}), BatchSplit(4, 2), BatchSplit(3, 2)
    full, less = (tiled(("d0", "d1"), (behind,), split, out=out) for split in (even, odd))
    cost = CostModel(profile(tail=1.0), devices)
    assert round_of(cost, less).round_seconds < 0.8 * round_of(cost, full).round_seconds
    busy = round_of(cost, less).busy_seconds
    for name, whole in round_of(cost, full).busy_seconds.items():
        assert busy[name] == pytest.approx(0.75 * whole, rel=1e-3)
    found = dict.fromkeys(busy, 0.0)
    for (_, device), work in round_work(cost, less).items():
        found[cost.name(device)] += work.computing
    assert found == pytest.approx(busy)


def test_a_stage_on_a_device_with_tiles_never_computes_beside_them() -> None:
    """However deep they are."""
    plan = tiled(("d0", "d1"), ("d1",), BatchSplit(4, 1), depths=(3, 1))
    found = round_of(CostModel(profile(tail=1.0), house(2, {})), plan)
    assert found.round_seconds > found.busy_seconds["d1"] > 1.4 * found.busy_seconds["d0"]


def test_stages_behind_tell_each_other_where_one_has_tiles_too() -> None:
    plan = tiled(("d0", "d1"), ("d2", "d0"), ONE, depths=(1, 1, 1))
    slow = house(3, {("d2", "d0"): WIFI})
    returned = MAP_BYTES / WIFI.bytes_per_s  # the gradients for the tile of d0 take it too
    more = seconds(plan, slow) - seconds(plan, house(3, {}))
    assert more > 1.4 * returned


def test_the_rest_is_where_it_fits() -> None:
    """Linear layers that only the slower of two devices holds; both have tiles."""
    net = profile()
    heavy = replace(net.units[-1], parameter_bytes=40_000_000)
    net = replace(net, units=(*net.units[:-1], heavy))
    both = cluster(1.0, 1.5)
    small = replace(both.devices[0], memory_bytes=10_000_000)
    devices = replace(both, devices=(small, both.devices[1]))
    plan = make_plan(net, devices, asked())
    assert [device.name for device in plan.stages[-1].devices] == ["d1"]
    assert {device.name for device in plan.stages[0].devices} == {"d0", "d1"}
    assert make_plan(net, devices, asked(planner="auto")).found_by == "tiles"
    roomy = make_plan(net, both, asked())
    assert [device.name for device in roomy.stages[-1].devices] == ["d0"]


@pytest.mark.parametrize(
    ("machines", "share"), [(["", "", ""], 1), (["m", "m", ""], 2), (["m", "m", "m"], 1)]
)
def test_tiles_of_one_machine_share_its_interface(machines: list[str], share: int) -> None:
    """As far as what they send leaves the machine."""
    home = house(3, {})
    pairs = zip(home.devices, machines, strict=True)
    devices = tuple(replace(device, machine=machine) for device, machine in pairs)
    cost = CostModel(profile(), replace(home, devices=devices))
    link = TileLinks.of(cost).among([device.name for device in devices])
    assert link.bytes_per_s == FAST.bytes_per_s / share
