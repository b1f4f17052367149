"""Plans with a tiled first stage: who gets what, when `auto` takes them, and when nobody can."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from p2ptrain.errors import OptionError, PlanError, ProtocolError, size_text
from p2ptrain.net.forms import write_form
from p2ptrain.net.read_form import read_form
from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.simulation.simulate import simulate
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.feature_maps import MapsForm
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Profile, Spatial, Unit
from p2ptrain.plan.types.request import PlanMode, PlanRequest
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.tiling.planning import tiling_search
from p2ptrain.tiling.planning.make_plan import make_plan
from p2ptrain.tiling.planning.profile_maps import tiled_network
from p2ptrain.tiling.planning.tiled_plan import round_seconds, simulate_plan
from tests.support.feature_maps import chain
from tests.support.planning_examples import quick_request
from tests.support.tiling_examples import CONVOLUTION

SIZE, CHANNELS = 64, 8
UNITS = 5  # the last is no convolution
FAST_LINK = ClusterLink(1e9, 1e-5)


def profile(*, tail: float = 0.05, spatial: bool = True, maps: bool = False) -> Profile:
    """Four convolutions of a second forward and two back, and a loss that cannot be tiled."""
    geometry = Spatial((3, 3), (1, 1), (1, 1), (1, 1), SIZE, SIZE)
    area = 4 * SIZE * SIZE
    units = [
        Unit(f"conv{k}", 1_000, CHANNELS * area, CHANNELS * area, 10**9, geometry)
        for k in range(UNITS - 1)
    ]
    units = units if spatial else [replace(unit, spatial=None) for unit in units]
    units.append(Unit("loss", 1000, 0, 1000))
    forward = (1.0,) * (UNITS - 1) + (tail,)
    times = UnitTimes(forward, tuple(2 * seconds for seconds in forward), (0.0,) * UNITS)
    network = chain([CONVOLUTION] * (UNITS - 1), SIZE) if maps else None
    return Profile("net", 3 * area, 8, tuple(units), 0.0, TimeTable((1,), (times,)), network)


def cluster(
    *slowdowns: float, link: ClusterLink = FAST_LINK, memory_bytes: int = 1 << 30
) -> Cluster:
    devices = [
        ClusterDevice(f"d{k}", memory_bytes, slowdown, holder=k == 0)
        for k, slowdown in enumerate(slowdowns)
    ]
    return Cluster(tuple(devices), link)


def asked(**changed: object) -> PlanRequest:
    return replace(quick_request(1, planner="tiles"), **changed)  # type: ignore[arg-type]


def shapes(plan: Plan) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]:
    tiling = plan.stages[0].tiling
    assert tiling is not None
    return tiling.grid, tiling.borders, tuple(d.share for d in plan.stages[0].devices)


@pytest.mark.parametrize("maps", [False, True])
def test_all_devices_have_tiles_and_the_fastest_the_rest(maps: bool) -> None:
    plan = make_plan(profile(spatial=not maps, maps=maps), cluster(1.5, 1.0, 1.5, 2.0), asked())
    first, behind = plan.stages
    assert first.allocation is Allocation.TILES
    assert {device.name for device in first.devices} == {"d0", "d1", "d2", "d3"}
    assert [device.name for device in behind.devices] == ["d1"]
    assert 12.0 / 4 < plan.predicted.round_seconds < 12.15
    assert plan.left_out == ()
    assert Plan.from_json(plan.to_json()) == plan


def test_what_is_asked_for_is_obeyed() -> None:
    plan = make_plan(
        profile(), cluster(1.0, 1.0, 1.0), asked(grid=(2, 3), groups_of_units=(0, 1, 3))
    )
    assert shapes(plan) == ((2, 3), (0, 1, 3), (2, 2, 2))
    assert plan.stages[1].units == (3, UNITS)
    few = make_plan(profile(), cluster(1.0, 1.0, 2.0), asked(grid=(1, 2)))
    assert [out.name for out in few.left_out] == ["d2"]
    faster = make_plan(profile(), cluster(1.0, 3.0), asked(grid=(2, 2)))
    assert shapes(faster)[2] == (3, 1)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked(groups_of_units=(0, 5)), "layers 0 to 3 can be computed in tiles, not layer 4"),
        (asked(grid=(100, 1)), "a grid of 100 rows does not fit"),
        (asked(grid=(40, 1), groups_of_units=(0, 1, 4)), "narrower than the halo"),
        (asked(private=True), "--private keeps images on one device"),
        (asked(mode=PlanMode.ASYNC), "in mode sync only"),
        (asked(groups=False), "which is not allowed here"),
    ],
)
def test_what_cannot_be_is_named(request_: PlanRequest, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(profile(), cluster(1.0, 1.0), request_)


def test_one_tile_is_no_division_between_two_devices() -> None:
    with pytest.raises(PlanError, match="--grid 1x1 is one tile") as refused:
        make_plan(profile(), cluster(1.0, 1.0), asked(grid=(1, 1), batch_size=8))
    assert "faster alone" not in str(refused.value)


def test_one_tile_in_front_of_another_device_is_obeyed_where_it_is_slow() -> None:
    three = cluster(1.0, 1.0, 1.0, link=ClusterLink(5e3, 1.0))
    plan = make_plan(profile(), three, asked(grid=(1, 1), batch_size=8))
    assert [len(stage.devices) for stage in plan.stages] == [1, 1]
    alone = make_plan(profile(), three, PlanRequest(8, planner="single"))
    assert plan.predicted.round_seconds > alone.predicted.round_seconds


@pytest.mark.parametrize("memory_bytes", [0, 4_000, 40_000])
def test_a_device_without_room_learns_what_it_needs_and_has(memory_bytes: int) -> None:
    """Once, though it fails with each number of tiled units: what it needs where that is least."""
    least = [filters + behind for filters, behind in ((8_000, 3_000), (2_000, 9_000 + 131_072))]
    with pytest.raises(PlanError) as refused:
        make_plan(profile(), cluster(1.0, 1.0, memory_bytes=memory_bytes), asked())
    message = str(refused.value)
    assert message.count("too little memory for a tile") == 1
    needed_bytes = next(needed for needed in least if needed > memory_bytes)
    needed, has = size_text(needed_bytes), size_text(memory_bytes)
    assert f"d0 has too little memory for a tile: it needs more than {needed} and has {has}" in (
        message
    )


@pytest.mark.parametrize("split", [BatchSplit(1, 1), BatchSplit(8, 1)])
def test_tiles_end_where_they_may(split: BatchSplit) -> None:
    """Large filters end them behind the first unit, alone and in front of a pipeline."""
    free = profile(maps=True)
    assert free.maps is not None
    heavy = [replace(unit, parameter_bytes=10**10) for unit in free.maps.units[1:]]
    maps = replace(free.maps, units=(free.maps.units[0], *heavy))
    request = asked(batch_size=split.batch_size, micro_batch=split.micro_batch)
    devices = cluster(1.0, 1.0, 1.0, link=ClusterLink(1e8, 1e-5), memory_bytes=1 << 40)
    ends = []
    for least in (1, 3):
        net = replace(free, maps=replace(maps, least=least))
        plan = make_plan(net, devices, request)
        ends.append(plan.stages[0].units[1])
        assert (len(plan.stages[1].devices), plan.stages[1].units[0]) == (1, ends[-1])
    assert ends == [1, 3]


def test_where_tiles_may_not_end_is_reported() -> None:
    net = profile(maps=True)
    assert net.maps is not None
    net = replace(net, maps=replace(net.maps, least=3))
    devices = cluster(1.0, 1.0)
    with pytest.raises(
        PlanError, match="cannot end after layer 1, because layer 2 reads the images"
    ):
        make_plan(net, devices, asked(groups_of_units=(0, 1, 2)))
    assert shapes(make_plan(net, devices, asked(groups_of_units=(0, 1, 3))))[1] == (0, 1, 3)


def test_a_profile_without_geometry_cannot_be_tiled() -> None:
    bare = profile(spatial=False)
    with pytest.raises(PlanError, match="this profile has no convolution sizes"):
        make_plan(bare, cluster(1.0, 1.0), asked())
    assert make_plan(bare, cluster(1.0, 1.0), asked(planner="auto")).found_by != "tiles"


def test_a_grid_is_for_the_planner_that_tiles() -> None:
    with pytest.raises(OptionError, match="are for planner tiles"):
        PlanRequest(1, grid=(1, 2))


def test_one_device_alone_has_nothing_to_divide() -> None:
    plan = make_plan(profile(), cluster(1.0), asked())
    assert (plan.planner, len(plan.stages)) == ("tiles", 1)


def test_auto_tiles_where_that_is_faster_and_only_there() -> None:
    devices = cluster(1.0, 1.0, 1.0, 1.0)
    tiled = make_plan(profile(), devices, asked(planner="auto"))
    assert tiled.found_by == "tiles"
    alone = make_plan(profile(), devices, asked(planner="single"))
    assert tiled.predicted.samples_per_s > 2.0 * alone.predicted.samples_per_s
    many = make_plan(profile(), devices, asked(planner="auto", batch_size=64))
    assert many.found_by != "tiles"
    slow = replace(devices, default_link=ClusterLink(1e4, 0.1))
    alone = make_plan(profile(), slow, asked(planner="auto"))
    assert alone.found_by != "tiles"


def test_auto_tiles_where_no_single_device_holds_the_maps() -> None:
    """Nor any cut between units: one unit's maps are too large for every device."""
    whole = profile()
    needed = max(unit.activation_bytes for unit in whole.units)
    tight = cluster(*[1.0] * 6, link=ClusterLink(1e6, 0.1), memory_bytes=int(1.8 * needed))
    with pytest.raises(PlanError):
        make_plan(whole, tight, asked(planner="single", batch_size=2, micro_batch=2))
    plan = make_plan(whole, tight, asked(planner="auto", batch_size=2, micro_batch=2))
    assert plan.found_by == "tiles"
    assert max(plan.predicted.peak_bytes.values()) <= int(1.8 * needed)


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        ((65, 65), OptionError, "at most 4096 tiles, found 4225"),
        ((4000, 1), PlanError, f"a grid of 4000 rows does not fit .* {SIZE} rows"),
    ],
)
def test_a_grid_that_no_map_holds_is_refused_before_its_lines_are_drawn(
    monkeypatch: pytest.MonkeyPatch, grid: tuple[int, int], error: type[Exception], message: str
) -> None:
    monkeypatch.delattr(tiling_search, "balanced_shares")
    with pytest.raises(error, match=message):
        make_plan(profile(), cluster(1.0, 1.0), asked(grid=grid))


def test_where_nothing_fits_auto_says_what_it_says_without_tiles() -> None:
    small = cluster(1.0, 1.0, memory_bytes=1000)
    told = []
    for planner, model in (("auto", profile()), ("auto", profile(spatial=False))):
        with pytest.raises(PlanError, match="missing") as caught:
            make_plan(model, small, asked(planner=planner))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_memory_is_checked() -> None:
    with pytest.raises(PlanError, match=r"too little memory|do not fit"):
        make_plan(profile(), cluster(1.0, 1.0, memory_bytes=100_000), asked())


def test_what_is_predicted_is_what_is_simulated() -> None:
    devices = cluster(1.0, 2.0)
    plan = make_plan(profile(), devices, asked())
    simulated = simulate_plan(plan, profile(), devices)
    assert simulated.round_seconds == pytest.approx(plan.predicted.round_seconds)
    assert simulated.peak_bytes == plan.predicted.peak_bytes
    assert 0.0 < max(simulated.busy_share.values()) <= 1.0
    with pytest.raises(OptionError, match=r"simulated by tiling\.planning"):
        simulate(plan, profile(), devices)
    cost = CostModel(profile(), devices)
    assert round_seconds(cost, plan) == simulated.round_seconds
    other = make_plan(profile(), devices, asked(planner="single"))
    assert round_seconds(cost, other) == other.predicted.round_seconds


def test_a_chain_read_from_a_file_has_the_maps_that_its_units_say() -> None:
    network = tiled_network(profile())
    assert network is not None
    assert [(m.channels, m.height, m.width) for m in network.maps] == [
        (3, SIZE, SIZE),
        *[(CHANNELS, SIZE, SIZE)] * (UNITS - 1),
    ]
    odd = replace(profile().units[2].spatial, height=7)  # type: ignore[type-var]
    units = list(profile().units)
    units[2] = replace(units[2], spatial=odd)
    shorter = tiled_network(replace(profile(), units=tuple(units)))
    assert shorter is not None
    assert len(shorter.units) == 2


@pytest.mark.parametrize(("said", "count"), [("read", 1), ("read", 4), ("made", 3), ("made", 4)])
def test_sizes_may_be_of_the_maps_read_or_made(said: str, count: int) -> None:
    """224 x 224, kernel 7 stride 2, pooling stride 2, then two that keep the size."""
    windows = [(7, 2, 3), (3, 2, 1), (3, 1, 1), (3, 1, 1)][:count]
    sizes = [224, 112, 56, 56, 56]
    shown = sizes if said == "read" else sizes[1:]
    units = [
        Unit(
            f"unit{k}",
            1_000,
            4 * CHANNELS * sizes[k + 1] ** 2,
            1,
            10**9,
            Spatial((kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), shown[k], shown[k]),
        )
        for k, (kernel, stride, padding) in enumerate(windows)
    ]
    units.append(Unit("loss", 1000, 0, 1000))
    nothing = (0.0,) * len(units)
    times = TimeTable((1,), (UnitTimes(nothing, nothing, nothing),))
    network = tiled_network(Profile("net", 3 * 4 * 224**2, 8, tuple(units), 0.0, times))
    assert network is not None
    assert [m.height for m in network.maps] == [m.width for m in network.maps] == sizes[: count + 1]
    assert [m.channels for m in network.maps] == [3, *[CHANNELS] * count]


@dataclass(frozen=True)
class Asked:
    maps: MapsForm


def test_a_network_survives_as_plain_data() -> None:
    network = replace(chain([CONVOLUTION] * 3, 20, statistics=[1]), least=2)
    fields = write_form(Asked(network))["maps"]
    assert read_form(Asked, {"maps": fields}, "question").maps == network
    for wrong in (
        {"units": []},
        {"itemsize": 0},
        {"least": 0},
        {"least": 4},
        {"leaving": [99]},
        {"entering": [0, 1]},
        {"operations": fields["operations"][:1]},
        {"maps": [["a", 0, 1, 1, True]]},
        {"units": [["u", 1, 3, 0]]},
    ):
        with pytest.raises(ProtocolError, match=r"question\.maps"):
            read_form(Asked, {"maps": {**fields, **wrong}}, "question")


def test_accelerators_have_no_tiles() -> None:
    card, *others = cluster(1.0, 1.0, 1.0).devices
    mixed = Cluster((replace(card, compute="card"), *others), FAST_LINK)
    with pytest.raises(PlanError, match=r"processors, and d0 computes with card.*--device cpu"):
        make_plan(profile(), mixed, asked())
    plan = make_plan(profile(), mixed, quick_request(1))
    assert plan.found_by == "tiles"
    assert plan.stages[0].tiling is not None
    assert {device.name for device in plan.stages[0].devices} == {"d1", "d2"}
    assert {out.name: out.reason for out in plan.left_out}["d0"] == "tiles are faster than card"
