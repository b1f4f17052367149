"""A stage of several devices behind tiles: what its mini-batch takes, what it holds, its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.coordinator.plan_expectations import round_work
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import Draft, StageGroup, alone, draft_groups, place_seconds
from p2ptrain.plan.simulation.simulate import round_seconds
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.plan import DeviceShare, Plan
from p2ptrain.plan.types.profile import Profile, Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning.tiled_pipeline import (
    Passes,
    TrailingPipeline,
    depths_that_fit,
    pipeline_engine,
    pipeline_seconds,
)
from p2ptrain.tiling.planning.tiled_plan import costs_of, round_of, row_of
from p2ptrain.tiling.planning.tiling_problem import Passage
from p2ptrain.tiling.planning.tiling_simulation import lower_bound
from tests.unit.tiling.planning.test_ends import FAST, SLACK, WIFI, house, tiled
from tests.unit.tiling.planning.test_pipelined_tiling import SPLIT, cost_of, passes
from tests.unit.tiling.planning.test_tiled_plan import CHANNELS, SIZE, profile

MAP_BYTES = CHANNELS * SIZE * SIZE * 4
DEALING, DIVIDING = Allocation.MICRO_BATCHES, Allocation.SAMPLES
WAYS = [(DEALING, (3, 1)), (DIVIDING, (1, 2))]
SHARED = BatchSplit(11, 3)


def shared(
    tiles: Sequence[str],
    behind: Sequence[str],
    way: tuple[Allocation, tuple[int, ...]],
    split: BatchSplit = SHARED,
    *,
    depths: Sequence[int] = (1, 1),
) -> Plan:
    """Tiles, and one stage of the last unit, or of the last two, on all of `behind`."""
    alone = tiled(tiles, behind[:1], split, depths=depths)
    devices = tuple(map(DeviceShare, behind, way[1]))
    stage = replace(alone.stages[1], devices=devices, allocation=way[0])
    return replace(alone, stages=(alone.stages[0], stage))


def twice(one: Passes) -> Passes:
    """Two devices go on with the maps instead of one."""
    return replace(one, leaving=one.leaving * 2, returning=one.returning * 2)


def test_two_devices_take_turns() -> None:
    """
    tiles    F0 F1 F2 F3 .  B0 B1 .  .  B2 B3 sum
    stage 1  .  F0 F0 B0 B0 F2 F2 B2 B2 .  sum
             .  .  F1 F1 B1 B1 F3 F3 B3 B3 sum
    """
    once = cost_of(2)
    slow = replace(once.profile, times=once.profile.times.times_slowdown(2))
    cost = CostModel(slow, Cluster(once.devices, ClusterLink(1e18, 0.0)))
    row = TrailingPipeline((1, 2), (StageGroup((2, 3), (2, 2), DEALING),))
    engine = pipeline_engine(cost, SPLIT, twice(passes(1.0, 1.0, 0.0, 0.0, 1.0)), row, (4, 2))
    assert engine.run() == 12.0
    assert [lane.end for lane in engine.lanes] == [11.0, 9.0, 10.0]
    assert engine.reduced == {0: (11.0, 12.0), 1: (10.0, 10.0)}


def test_the_sum_of_a_group_takes_its_time() -> None:
    """Beside the tiles' last backward; here it is the longest."""
    heavy = cost_of(2)
    units = tuple(replace(unit, parameter_bytes=10**9) for unit in heavy.profile.units)
    linked = Cluster(heavy.devices, ClusterLink(1e9, 0.5))
    cost = CostModel(replace(heavy.profile, units=units, target_bytes=0), linked)
    row = TrailingPipeline((1, 2), (StageGroup((2, 3), (2, 2), DEALING),))
    engine = pipeline_engine(cost, SPLIT, twice(passes(0.0, 1.0, 0.0, 0.0, 0.0)), row, (4, 2))
    end = engine.run()
    start, summed = engine.reduced[1]
    assert start == max(lane.end for lane in engine.lanes if lane.stage == 1)
    assert end == summed == start + cost.all_reduce_seconds((2, 3), 1, 2) == start + 2.0


@st.composite
def drawn(draw: st.DrawFn) -> tuple[CostModel, Draft]:
    """Device 0, which is the holder, and then one to three groups of the others.

    Numbers with few bits, so that no rounding decides which of two transfers is first.
    """
    count, batch = draw(st.integers(2, 4)), draw(st.integers(2, 12))
    split = BatchSplit(batch, draw(st.integers(2, batch)))
    seconds = st.integers(1, 128).map(lambda k: k / 64)
    times = [tuple(draw(seconds) for _ in range(count)) for _ in range(2)]
    units = tuple(
        Unit(f"u{k}", draw(st.integers(0, 1000)) << 10, draw(st.integers(1, 1000)) << 10, 1, 1)
        for k in range(count)
    )
    profile = Profile(
        *("net", 8, 1 << 17, units, 0.0),
        TimeTable((1,), (UnitTimes(times[0], times[1], (0.0,) * count),)),
    )
    sizes = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, count - 1)))]
    devices = tuple(
        ClusterDevice(f"d{k}", 1 << 40, draw(st.integers(1, 12)) / 4, holder=k == 0)
        for k in range(1 + sum(sizes))
    )
    links = {
        (a.name, b.name): ClusterLink(
            2.0 ** draw(st.integers(17, 23)), draw(st.integers(0, 100)) / 1024
        )
        for a in devices
        for b in devices
        if a is not b
    }
    groups, first = [], 1
    for size in sizes:
        groups.append(draw_group(draw, split, tuple(range(first, first + size))))
        first += size
    borders = (*range(len(groups) + 1), count)
    made = draft_groups(
        CostModel(profile, Cluster(devices, FAST, links)),
        *(split, borders, (alone(split, 0), *groups)),
    )
    assert made is not None
    return CostModel(profile, Cluster(devices, FAST, links)), made


def draw_group(draw: st.DrawFn, split: BatchSplit, devices: tuple[int, ...]) -> StageGroup:
    """They deal or divide, as far as there is something for each."""
    ways = [(DIVIDING, split.micro_batch), (DEALING, split.micro_batches)]
    way, total = draw(st.sampled_from(ways))
    used = devices[:total]
    if len(used) == 1:
        return alone(split, used[0])
    cuts = draw(
        st.lists(
            st.integers(1, total - 1),
            min_size=len(used) - 1,
            max_size=len(used) - 1,
            unique=True,
        )
    )
    shares = tuple(b - a for a, b in pairwise([0, *sorted(cuts), total]))
    return StageGroup(used, shares, way)


def as_tiles(cost: CostModel, draft: Draft) -> Passes:
    """What the first stage's device does and sends, as if it were tiles."""
    split, group = draft.split, draft.groups[1]
    forward, backward = cost.stage_seconds(0, *draft.units[0], split.first_samples)
    there, back = [], []
    for place, device in enumerate(group.devices):
        samples = split.first_samples if group.deals else max(group.piece_counts(split, place))
        size = samples * cost.cut_bytes(draft.borders[1])
        for ways, link in ((there, cost.link(0, device)), (back, cost.link(device, 0))):
            ways.append(Passage(((0, size / link.bytes_per_s),), link.latency_s))
    nothing = Passage((), 0.0)
    devices = frozenset((0,))
    return Passes(forward, backward, nothing, tuple(there), tuple(back), 0.0, devices)


@given(drawn())
def test_behind_tiles_a_group_takes_what_it_takes_in_any_round(
    found: tuple[CostModel, Draft],
) -> None:
    cost, draft = found
    row = TrailingPipeline(draft.borders[1:], draft.groups[1:])
    ours = pipeline_seconds(cost, draft.split, as_tiles(cost, draft), row, draft.warmup)
    assert ours == pytest.approx(round_seconds(cost, draft), rel=1e-12)


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_all_of_a_stage_on_one_device_is_that_device_alone(slowdown: float) -> None:
    devices = house(3, {})
    cost = CostModel(profile(tail=slowdown), devices)
    plan = tiled(("d0", "d1"), ("d2",), SHARED, depths=(3, 1))
    whole = shared(("d0", "d1"), ("d2",), (DEALING, (SHARED.micro_batches,)), depths=(3, 1))
    assert round_of(cost, whole) == round_of(cost, plan)
    group, units = alone(SHARED, 2), (4, 5)
    full, last = (
        sum(cost.stage_seconds(2, *units, samples))
        for samples in (SHARED.first_samples, SHARED.last_samples)
    )
    seconds = (SHARED.micro_batches - 1) * full + last
    assert place_seconds(cost, SHARED, group, 0, units) == pytest.approx(seconds)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_no_round_undercuts_what_its_devices_compute(
    way: tuple[Allocation, tuple[int, ...]], overlap: bool
) -> None:
    """Nor what the tiles take at best, with what follows them for a micro-batch in between."""
    cost = CostModel(profile(tail=2.0), house(4, {}), overlap=overlap)
    plan = shared(("d0", "d1"), ("d2", "d3"), way, depths=(4, 2))
    found, tiles = round_of(cost, plan), costs_of(cost, plan).costs
    assert found.round_seconds > max(found.busy_seconds.values())
    assert found.round_seconds > lower_bound(
        tiles.problem, tiles.devices, least=2, pieces=SHARED.batch_size / SHARED.micro_batch
    )
    tile_seconds = found.busy_seconds["d0"] / SHARED.batch_size * SHARED.last_samples
    assert found.round_seconds > tile_seconds + max(found.busy_seconds[d] for d in ("d2", "d3"))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_device_computes_and_holds_what_is_its_own(
    way: tuple[Allocation, tuple[int, ...]],
) -> None:
    cost = CostModel(profile(tail=2.0), house(4, {}))
    plan = shared(("d0", "d1"), ("d2", "d3"), way, depths=(4, 2))
    found, one = round_of(cost, plan), tiled(("d0", "d1"), ("d2",), SHARED, out=("d3",))
    ((group, units),) = row_of(cost, plan).stages
    together = sum(found.busy_seconds[name] for name in ("d2", "d3"))
    assert together == pytest.approx(round_of(cost, one).busy_seconds["d2"])
    for place, name in enumerate(("d2", "d3")):
        samples = group.in_flight_samples(SHARED, place, 2)
        assert found.peak_bytes[name] == cost.peak_bytes(*units, samples)
        done = group.round_samples(SHARED, place) / SHARED.batch_size
        assert found.busy_seconds[name] == pytest.approx(done * together)
    for (_, device), work in round_work(cost, plan).items():
        assert work.computing == pytest.approx(found.busy_seconds[cost.name(device)])


def test_with_overlap_sums_are_messages_of_those_who_share() -> None:
    heavy = profile(tail=2.0)
    units = tuple(replace(unit, parameter_bytes=10**8) for unit in heavy.units)
    cost = CostModel(replace(heavy, units=units), house(4, {}), overlap=True)
    plan = shared(("d0", "d1"), ("d2", "d3"), WAYS[0])
    work, seconds = round_work(cost, plan), cost.all_reduce_seconds((2, 3), 4, 5)
    assert min(work[1, device].messages for device in (2, 3)) > seconds > 0.5
    one = round_work(cost, tiled(("d0", "d1"), ("d2",), SHARED, out=("d3",)))
    assert one[1, 2].messages < seconds


@pytest.mark.parametrize(("way", "part"), [(WAYS[0], 1.0), (WAYS[1], 2 / 3)], ids=str)
def test_maps_go_to_those_who_need_them(
    way: tuple[Allocation, tuple[int, ...]], part: float
) -> None:
    """One of the two devices is on Wi-Fi: dealing whole maps go there, dividing their part."""
    split = BatchSplit(4, 1) if way[0] is DEALING else BatchSplit(3, 3)
    plan = shared(("d0", "d1"), ("d2", "d3"), way, split)
    quick = profile(tail=0.001)
    quick = replace(quick, times=quick.times.times_slowdown(1e-6))
    slow = {(d, "d3"): WIFI for d in ("d0", "d1")}
    taken = [
        round_of(CostModel(quick, devices), plan).round_seconds
        for devices in (house(4, slow), house(4, {}))
    ]
    sent = part * split.first_samples * MAP_BYTES
    more = sent / WIFI.bytes_per_s + WIFI.latency_s - sent / FAST.bytes_per_s
    assert taken[0] - taken[1] == pytest.approx(more, rel=SLACK)


def test_memory_lowers_the_depth_of_those_who_share() -> None:
    split = BatchSplit(8, 1)
    row = TrailingPipeline((1, 2), (StageGroup((2, 3), (4, 4), DEALING),))
    free, tight = (
        cost_of(2, kept_bytes=10, memory_bytes=memory_bytes) for memory_bytes in (10**9, 10)
    )
    assert depths_that_fit(free, split, row, 8) == (4, 2)
    assert depths_that_fit(tight, split, row, 8) == (4, 2), "each has one of the two in flight"
    assert depths_that_fit(free, split, row, 1) == (1, 1)
    lopsided = replace(row, groups=(StageGroup((2, 3), (7, 1), DEALING),))
    assert depths_that_fit(tight, split, lopsided, 8) == (4, 1)
    assert depths_that_fit(cost_of(2, kept_bytes=10, memory_bytes=9), split, row, 8) is None
