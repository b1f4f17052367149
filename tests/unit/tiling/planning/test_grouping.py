"""The dynamic programme against all groupings, and the simulation between bound and estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PlanError
from p2ptrain.plan.types.feature_maps import AxisWindow
from p2ptrain.tiling.planning.grouping import best_grouping
from p2ptrain.tiling.planning.tiling_cost import Costs
from p2ptrain.tiling.planning.tiling_simulation import lower_bound, simulate_tiles
from tests.support.feature_maps import chain
from tests.support.thorough import examples_of
from tests.support.tiling_examples import (
    CONVOLUTION,
    GIGAFLOP,
    LINK,
    by_flops,
    costs,
    drawn_costs,
    problem,
)


def groupings(count: int) -> Iterator[tuple[int, ...]]:
    for inner in range(count):
        for borders in combinations(range(1, count), inner):
            yield (0, *borders, count)


@settings(max_examples=examples_of(5), deadline=None)
@given(drawn_costs())
def test_no_grouping_is_faster(found: Costs) -> None:
    count = len(found.problem.network.units)
    totals = [found.total(borders) for borders in groupings(count)]
    assert found.total(best_grouping(found)) == pytest.approx(min(totals), rel=1e-12)


@pytest.mark.parametrize("place", [1, 2])
def test_where_memory_asks_for_groups_that_the_grid_does_not_carry_the_unit_is_named(
    place: int,
) -> None:
    """Without that unit memory would do; all units as one group need more than there is."""
    windows = [CONVOLUTION] * 4
    windows[place] = AxisWindow(19, 1, 1, 9, 9)
    question = by_flops(chain(windows, 24), 1, LINK, flops_per_s=GIGAFLOP)
    assert best_grouping(costs(question, (1, 4)))[0] == 0
    wanted = (
        rf"smaller groups do not fit the grid: tiles of layer unit{place - 1} have "
        rf"\[6, 6, 6, 6\] columns, narrower than the halo that layer unit{place} needs: tile 0 .*"
        r"Take fewer columns$"
    )
    with pytest.raises(PlanError, match=wanted):
        best_grouping(costs(question, (1, 4), memory_bytes=10_000))


@settings(max_examples=examples_of(5), deadline=None)
@given(drawn_costs(), st.floats(0.0, 1.0))
def test_no_grouping_that_fits_is_faster(found: Costs, part: float) -> None:
    count = len(found.problem.network.units)
    possible = [b for b in groupings(count) if found.total(b) < float("inf")]
    if not possible:
        return
    peaks = {borders: max(found.memory(borders)) for borders in possible}
    room = min(peaks.values()) + part * (max(peaks.values()) - min(peaks.values())) + 1e-6
    found.devices = tuple(replace(device, memory_bytes=room) for device in found.devices)
    fitting = [found.total(borders) for borders in possible if peaks[borders] <= room]
    assert found.total(best_grouping(found)) == pytest.approx(min(fitting), rel=1e-12)


def test_what_does_not_fit_is_named() -> None:
    found = costs(problem(3), memory_bytes=10_000)
    with pytest.raises(PlanError, match=r"after every layer: d0 needs .* kB and has 10 kB, d1"):
        best_grouping(found)


@settings(max_examples=examples_of(5), deadline=None)
@given(drawn_costs())
def test_simulated_time_lies_between_the_bound_and_the_estimate(found: Costs) -> None:
    for borders in groupings(len(found.problem.network.units)):
        if found.total(borders) < float("inf"):
            simulated = simulate_tiles(found, borders).seconds
            assert simulated <= found.total(borders) * (1 + 1e-9)
            assert simulated >= lower_bound(found.problem, found.devices) * (1 - 1e-9)
