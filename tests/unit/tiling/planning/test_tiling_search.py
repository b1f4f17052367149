"""The paper's findings, and no tiles where they do not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from p2ptrain.errors import PlanError
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.feature_maps import MapUnit
from p2ptrain.tiling.planning.grouping import best_grouping
from p2ptrain.tiling.planning.tiled_pipeline import TrailingChoice, TrailingPipeline
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import TileDevice, TilingProblem
from p2ptrain.tiling.planning.tiling_search import best_tiling
from p2ptrain.tiling.planning.tiling_setting import Tiling, TilingRequest
from p2ptrain.tiling.planning.tiling_simulation import simulate_tiles
from tests.support.tiling_examples import by_flops, problem
from tools.paper_tiles import LINKS, SPEEDS, gain, question, yolov2

SLOW, FAST = SPEEDS["Pi 3 core (0.13 Gflop/s)"], SPEEDS["GPU (5000)"]
NETWORK = yolov2(statistics=False)
UNITS = len(NETWORK.units)
ALONE = TilingRequest()


@dataclass(frozen=True, slots=True)
class Untiled:
    """The question's own units alone: each micro-batch through the tiles and then the others."""

    problem: TilingProblem
    pieces: float = 1.0

    def alone(self, device: TileDevice, units: int) -> float:
        """See `Rest`."""
        rest = sum(self.problem.forward[units:]) + sum(self.problem.backward[units:])
        return self.pieces * rest * device.slowdown

    def held_bytes(self, units: int) -> float:
        """See `Rest`."""
        problem = self.problem
        parameters = sum(unit.parameter_bytes for unit in problem.network.units[units:])
        held = parameters * (2.0 + problem.optimizer_state_ratio)
        return held + sum(problem.kept_bytes[units:]) * problem.samples

    def whole(self, device: TileDevice, costs: Costs, borders: tuple[int, ...]) -> TrailingChoice:
        """See `Rest`."""
        once = costs.filter_seconds
        tiles = self.pieces * (simulate_tiles(costs, borders).seconds - once) + once
        return TrailingChoice(tiles + self.alone(device, borders[-1]), TrailingPipeline((), ()))


def best_alone(
    problem: TilingProblem,
    devices: Sequence[TileDevice],
    asked: TilingRequest = ALONE,
) -> Tiling:
    """Where nothing but the question's own units is behind the tiles."""
    return best_tiling(problem, devices, asked, Untiled(problem, asked.pieces))


def test_slow_devices_exchange_at_every_layer() -> None:
    """Figure 7: on Raspberry Pis and 100 Mbit/s grouping gains nothing, large groups lose."""
    costs = question(NETWORK, 8, LINKS["100 Mbit/s"], SLOW, (2, 3))
    assert gain(costs)[0] < 1.01
    each = simulate_tiles(costs, range(UNITS + 1)).seconds
    assert simulate_tiles(costs, (0, 4, 8, 12, 16)).seconds > 1.03 * each


@pytest.mark.parametrize("shape", [(1, 2), (2, 3)])
def test_fast_devices_on_slow_links_group(shape: tuple[int, int]) -> None:
    """Figure 8 and section 5.4: with accelerators grouping pays."""
    costs = question(NETWORK, 1, LINKS["100 Mbit/s"], FAST, shape)
    assert gain(costs)[0] > 1.2


def test_statistics_leave_grouping_less_to_gain() -> None:
    exact = question(yolov2(statistics=True), 1, LINKS["100 Mbit/s"], FAST, (1, 2))
    free = question(NETWORK, 1, LINKS["100 Mbit/s"], FAST, (1, 2))
    assert 1.2 < gain(exact)[0] < gain(free)[0]


def test_the_filters_cap_a_single_sample() -> None:
    """13.7 MB of filters at 100 Mbit/s take longer than two devices save on one sample."""
    flops = by_flops(NETWORK, 1, LINKS["100 Mbit/s"], flops_per_s=1.0).seconds
    slow = by_flops(NETWORK, 1, LINKS["100 Mbit/s"], flops_per_s=flops / 1.5)
    found = best_alone(slow, [TileDevice(f"d{k}") for k in range(2)])
    assert 1.0 <= slow.seconds / found.seconds < 1.4
    assert found.borders[-1] < UNITS  # tiled only as far as it pays
    fast = question(NETWORK, 1, LINKS["1 Gbit/s"], flops / 1.5, (1, 2))
    assert fast.problem.seconds / simulate_tiles(fast, best_grouping(fast)).seconds > 1.5


def test_nothing_where_nothing_pays() -> None:
    """Slower than one device alone."""
    devices = [TileDevice("slow", 2.0), TileDevice("fast", 1.0)]
    slow = problem(3, link=ClusterLink(1e3, 1.0))
    assert best_alone(slow, devices).seconds > slow.seconds
    with pytest.raises(PlanError):
        best_alone(slow, devices, TilingRequest(below=slow.seconds))


def test_unequal_devices_have_unequal_tiles() -> None:
    question_ = problem(4, link=ClusterLink(1e12, 0.0), flops_per_s=1e6)
    found = best_alone(question_, [TileDevice("slow", 3.0), TileDevice("fast", 1.0)])
    assert found.devices == ("fast", "slow")
    assert found.rows[0] * found.columns[0] == pytest.approx(0.75)
    assert found.seconds < 0.80 * question_.seconds
    assert found.seconds >= found.bound


def test_memory_makes_tiles_where_one_device_is_too_small() -> None:
    tight = problem(3, link=ClusterLink(1e4, 1.0))
    needed = tight.filters.trained + sum(tight.kept_bytes)
    devices = [TileDevice(f"d{k}", memory_bytes=0.7 * needed) for k in range(2)]
    found = best_alone(tight, devices)
    assert max(found.memory_bytes) <= 0.7 * needed
    with pytest.raises(PlanError):
        best_alone(tight, [replace(d, memory_bytes=0.3 * needed) for d in devices])


@pytest.mark.parametrize("borders", [(), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("part", [0.3, 0.41, 0.45])
def test_lines_leave_room_for_halos_where_memory_draws_them(
    part: float, borders: tuple[int, ...]
) -> None:
    """One of two equal devices holds so much of the maps; units of two convolutions have halos."""
    tight = blocks()
    room = tight.filters.trained + part * sum(tight.kept_bytes)
    devices = [TileDevice("large"), TileDevice("small", 1.0, room)]
    found = best_alone(tight, devices, TilingRequest(grid=(1, 2), borders=borders))
    assert found.borders == borders or not borders
    used = dict(zip(found.devices, found.memory_bytes, strict=True))
    assert used["small"] <= room
    if found.borders[-1] == 2:  # not only what fits easily
        assert used["small"] >= 0.9 * room


def test_a_refusal_says_what_the_first_lines_lacked() -> None:
    tight = blocks()
    rooms = [tight.filters.trained + p * sum(tight.kept_bytes) for p in (0.6, 0.41)]
    devices = [TileDevice(name, 1.0, room) for name, room in zip("ab", rooms, strict=True)]
    with pytest.raises(PlanError, match=r"[ab] needs .* for its tiles in these groups"):
        best_alone(tight, devices, TilingRequest(grid=(1, 2), borders=(0, 2)))


def blocks() -> TilingProblem:
    """Two units of two convolutions each."""
    network = problem(4).network
    units = (MapUnit("first", 0, 2, 100), MapUnit("second", 2, 4, 100))
    return by_flops(replace(network, units=units), 1, ClusterLink(1e12, 0.0), flops_per_s=1e6)
