from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.cluster import ClusterLink, Overheads
from p2ptrain.plan.types.feature_maps import ELEMENTWISE, MapUnit
from p2ptrain.tiling.grid import TileGrid
from p2ptrain.tiling.planning.grouping import early_borders
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_problem import TileDevice, TilingProblem
from p2ptrain.tiling.planning.tiling_simulation import lower_bound, simulate_tiles
from tests.support.feature_maps import chain
from tests.support.tiling_examples import (
    CONVOLUTION,
    GIGAFLOP,
    LINK,
    NOTHING,
    by_flops,
    costs,
    problem,
)

SIZE, CHANNELS = 48, 4
COLUMN_BYTES = SIZE * CHANNELS * 4


def test_a_group_s_time_by_hand() -> None:
    """Two halves of 48 columns, three convolutions; 1,000 operations a position, 1 Gflop/s."""
    found = costs(problem(3))
    position = 1000 / 1e9
    alone = found.group(1, 2)
    assert alone is not None
    computed = 24 * SIZE * position * 3
    halo = LINK.latency_s + COLUMN_BYTES / LINK.bytes_per_s
    assert alone.seconds == pytest.approx(computed + 2 * halo)
    assert alone.halo.sent == alone.halo.received == (COLUMN_BYTES, COLUMN_BYTES)
    assert alone.repeated == pytest.approx(0.0)
    both = found.group(1, 3)
    assert both is not None
    computed = (24 + 25) * SIZE * position * 3
    halo = LINK.latency_s + 2 * COLUMN_BYTES / LINK.bytes_per_s
    assert both.seconds == pytest.approx(computed + 2 * halo)
    assert both.repeated == pytest.approx(1 - 96 / 98)
    first = found.group(0, 1)
    assert first is not None
    assert first.halo.is_empty  # the images come from the holder
    assert first.seconds == pytest.approx(24 * SIZE * position * 3)


def test_filters_and_ends_by_hand() -> None:
    found = costs(problem(3), (1, 3))
    ring = 4 * (300 / (3 * LINK.bytes_per_s) + LINK.latency_s)
    assert found.filter_seconds == pytest.approx(ring)
    others = 32 * COLUMN_BYTES
    images = LINK.latency_s + others / LINK.bytes_per_s
    assert found.end_seconds == pytest.approx(3 * images)  # images, last maps, their gradients
    groups = [found.group(k, k + 1) for k in range(3)]
    assert found.total((0, 1, 2, 3)) == pytest.approx(
        ring + 3 * images + sum(group.seconds for group in groups if group is not None)
    )


def test_statistics_divide_a_group_into_legs() -> None:
    found = costs(problem(3, statistics=[1]), slowdowns=[1.0, 2.0])
    group = found.group(0, 3)
    assert group is not None
    assert len(group.forward) == 2
    (everybody,) = group.statistics
    assert everybody.sent == (16 * CHANNELS, 16 * CHANNELS)
    legs = [max(leg) for leg in (*group.forward, *group.backward)]
    told = LINK.latency_s + 16 * CHANNELS / LINK.bytes_per_s
    assert group.seconds == pytest.approx(sum(legs) + 2 * told)


def test_tiles_of_one_device_tell_each_other_for_nothing() -> None:
    question = problem(3, statistics=[1])
    grid = TileGrid(question.network, ((1.0, 1.0), (1.0, 1.0)))
    one = Costs(question, [TileDevice("only")], grid, [0, 0, 0, 0])
    group = one.group(1, 2)
    assert group is not None
    assert group.halo.is_empty
    assert all(exchange.is_empty for exchange in group.statistics)
    assert one.fixed_seconds == 0.0
    assert one.total((0, 1, 2, 3)) == pytest.approx(question.seconds)


def test_overheads_are_the_device_s_own() -> None:
    slow = Overheads(1e-3, 1e-6, 0.0)
    found = costs(problem(2, overheads=slow), slowdowns=[1.0, 3.0])
    group = found.group(1, 2)
    assert group is not None
    processor = 2 * 1e-3 + 2 * COLUMN_BYTES * 1e-6
    assert processor > COLUMN_BYTES / LINK.bytes_per_s  # which goes on meanwhile
    assert found.device_seconds(group.halo, 0) == pytest.approx(processor)
    assert found.device_seconds(group.halo, 1) == pytest.approx(3 * processor)


def test_halos_travel_with_statistics_where_groups_meet_early() -> None:
    """Two units of a convolution and a normalisation: one exchange less, and the same work."""
    windows = [CONVOLUTION, ELEMENTWISE, CONVOLUTION, ELEMENTWISE]
    network = chain(windows, SIZE, statistics=[1, 3], flops=1000.0)
    units = (MapUnit("one", 0, 2, 100), MapUnit("two", 2, 4, 100))
    slow = Overheads(1e-3, 1e-6, 0.0)
    question = by_flops(
        replace(network, units=units), 1, LINK, flops_per_s=GIGAFLOP, overheads=slow
    )
    plain = costs(question)
    early = plain.with_early([1])
    first, second = early.group(0, 1), early.group(1, 2)
    apart = plain.group(1, 2)
    assert first is not None
    assert second is not None
    assert apart is not None
    assert not first.statistics
    assert len(second.statistics) == 1  # of its own convolution
    assert second.halo.messages == apart.halo.messages == (2, 2)
    assert second.halo.sent == (COLUMN_BYTES + 16 * CHANNELS,) * 2
    normalised_twice = SIZE * 1000 / GIGAFLOP * 3
    assert plain.total((0, 1, 2)) - early.total((0, 1, 2)) == pytest.approx(
        2 * (LINK.latency_s + 2 * 1e-3) - normalised_twice
    )
    assert early_borders(plain) == {1}
    assert early_borders(costs(problem(3))) == frozenset()
    assert early.memory((0, 1, 2)) == pytest.approx(plain.memory((0, 1, 2)), rel=0.1)


def test_what_the_grid_does_not_carry_takes_for_ever() -> None:
    found = costs(problem(6, size=9), (1, 3))
    assert found.group(1, 6) is None
    assert found.total((0, 1, 6)) == float("inf")


def test_memory_is_what_tiles_keep_and_the_filters() -> None:
    question = problem(3)
    found = costs(question)
    assert question.filters.trained == 2 * 300
    per_column = COLUMN_BYTES
    assert found.memory((0, 1, 2, 3)) == pytest.approx([600 + 3 * 24 * per_column] * 2)
    assert found.memory((0, 3)) == pytest.approx([600 + (26 + 25 + 24) * per_column] * 2)


def test_devices_far_from_the_slowest_run_ahead() -> None:
    """Only the neighbour of a slow device waits for it; the barrier's estimate is above."""
    question = problem(2, link=ClusterLink(1e12, 0.0))
    found = costs(question, (1, 3), slowdowns=[1.0, 1.0, 5.0])
    borders = (0, 1, 2)
    simulated = simulate_tiles(found, borders)
    slowest = simulated.computing[2]
    assert simulated.seconds == pytest.approx(slowest + found.fixed_seconds, rel=1e-4)
    assert simulated.seconds <= found.total(borders) * (1 + 1e-12)


def test_the_bound_allows_for_fewer_devices() -> None:
    question = problem(3, link=ClusterLink(1.0, 10.0))
    devices = [TileDevice("a"), TileDevice("b")]
    assert lower_bound(question, devices) == pytest.approx(question.seconds)
    fast = problem(3, link=ClusterLink(1e12, 0.0))
    assert lower_bound(fast, devices) == pytest.approx(fast.seconds / 2)


def test_what_does_not_belong_together_is_refused() -> None:
    question = problem(2)
    with pytest.raises(OptionError, match="units need as many times"):
        TilingProblem(question.network, (1.0,), (1.0, 1.0), (1.0, 1.0), 1, LINK)
    grid = TileGrid(question.network, ((1.0,), (1.0, 1.0)))
    with pytest.raises(OptionError, match="2 tiles, but 1 have a device"):
        Costs(question, [TileDevice("a")], grid, [0])
    assert NOTHING.message_seconds == 0


def test_processors_may_take_longer_than_the_ring() -> None:
    """4 (D - 1) messages a bucket and as many parts of the filters, on the slowest device."""
    slow = Overheads(1e-3, 1e-6, 0.0)
    found = costs(problem(3, overheads=slow, sums=slow), slowdowns=[1.0, 3.0])
    assert found.filter_seconds == pytest.approx(4 * 3.0 * (1e-3 + 1e-6 * 300 / 2))
    free = costs(problem(3), slowdowns=[1.0, 3.0])
    assert found.end_seconds > free.end_seconds


def test_sums_have_costs_of_their_own() -> None:
    slow = Overheads(1e-3, 1e-6, 0.0)
    free, between, summed = (
        costs(problem(3, **given)) for given in ({}, {"overheads": slow}, {"sums": slow})
    )
    assert between.filter_seconds == free.filter_seconds < summed.filter_seconds
    assert summed.end_seconds == free.end_seconds < between.end_seconds
