"""What planners know of halos that travel while interiors are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from p2ptrain.plan.cluster import Link
from p2ptrain.plan.overheads import Overheads
from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.simulate import simulate
from p2ptrain.tiles.interior import NEVER, SPLITTING, Splitting
from tests.thorough import examples_of
from tests.unit.plan.tiling.examples import LINK, costs, drawn_costs, problem
from tests.unit.plan.tiling.test_cost import CHANNELS, COLUMN_BYTES, SIZE
from tests.unit.plan.tiling.test_grouping import groupings

POSITION = 1000 / 1e9
HALF, STRIP = 24 * SIZE * POSITION, SIZE * POSITION
HALO = LINK.latency_s + COLUMN_BYTES / LINK.bytes_per_s
FREE_STRIPS = Splitting(least_part=0.5, least_operations=0.0, strip_cost=0.0)


def test_a_group_s_time_by_hand() -> None:
    """Two halves of 48 columns: one of 24 columns waits for the halo, which takes longer."""
    assert HALO > HALF
    group = costs(problem(3), splitting=SPLITTING).group(1, 2)
    assert group is not None
    strip = SPLITTING.strip_cost * STRIP
    assert group.interior == pytest.approx((HALF, HALF))
    assert group.forward[0] == pytest.approx((HALF + strip, HALF + strip))
    assert group.seconds == pytest.approx(HALO + strip + 2 * HALF + HALO)
    plain = costs(problem(3)).group(1, 2)
    assert plain is not None
    assert plain.seconds - group.seconds == pytest.approx(HALF - strip)
    assert plain.backward == group.backward
    assert plain.memory == group.memory


def test_a_halo_that_is_there_sooner_costs_nothing() -> None:
    """But a device's own processor handles messages before it computes."""
    link, overheads = Link(1e9, 1e-5), Overheads(1e-4, 0.0, 0.0, 0.0, 0.0)
    question = problem(3, link=link, overheads=overheads)
    group = costs(question, splitting=FREE_STRIPS).group(1, 2)
    assert group is not None
    told = 2 * 1e-4  # one message there, one back
    there = told + link.latency_s
    assert group.seconds == pytest.approx(told + 3 * HALF + there)


def test_simulated_devices_compute_while_a_halo_travels() -> None:
    borders = (0, 1, 2)
    strip = SPLITTING.strip_cost * STRIP
    split = simulate(costs(problem(2), splitting=SPLITTING), borders)
    assert split.forward == pytest.approx(HALF + HALO + strip)
    waiting = simulate(costs(problem(2)), borders)
    assert waiting.forward == pytest.approx(HALF + HALO + HALF)
    assert split.backward == pytest.approx(waiting.backward)


def test_a_device_waits_for_a_slow_neighbour_with_its_interior_done() -> None:
    """The neighbour is late by its first unit; meanwhile the other has done all but a strip."""
    question = problem(2, link=Link(1e12, 0.0))
    free = costs(question, slowdowns=[1.0, 1.5], splitting=FREE_STRIPS)
    plain = costs(question, slowdowns=[1.0, 1.5])
    quick, slow = HALF, 1.5 * HALF
    forward = simulate(free, (0, 1, 2)).forward
    assert forward == pytest.approx(2 * slow)
    assert simulate(plain, (0, 1, 2)).forward == pytest.approx(2 * slow)
    spans = [s for s in simulate(free, (0, 1, 2), record=True).forward_spans if not s.device]
    assert spans[-1].end_seconds == pytest.approx(2 * quick)  # strips are free here
    waited = [s for s in simulate(plain, (0, 1, 2), record=True).forward_spans if not s.device]
    assert waited[-1].end_seconds == pytest.approx(slow + quick)


def test_what_is_computed_meanwhile_is_no_exchange() -> None:
    found = costs(problem(2), splitting=FREE_STRIPS)
    simulated = simulate(found, (0, 1, 2), record=True)
    computed = [span for span in simulated.forward_spans if not span.exchanges]
    assert sum(s.end_seconds - s.start_seconds for s in computed) == pytest.approx(4 * HALF)
    assert simulated.computing == pytest.approx([6 * HALF] * 2)


def test_nothing_is_begun_before_statistics_or_with_little_work() -> None:
    for question in (problem(3, statistics=[1]), problem(3, size=24)):
        group = costs(question, splitting=SPLITTING).group(1, 2)
        assert group is not None
        assert group.interior == (0.0, 0.0)
    network = problem(3).network
    light = [replace(operation, flops=99.0 * CHANNELS) for operation in network.operations]
    question = replace(problem(3), network=replace(network, operations=tuple(light)))
    group = costs(question, splitting=SPLITTING).group(1, 2)
    assert group is not None
    assert group.interior == (0.0, 0.0)


def test_strips_that_take_longer_than_the_halo_are_not_worth_it() -> None:
    link = Link(1e12, 0.0)
    found = costs(problem(3, link=link), splitting=SPLITTING)
    assert found.interiors((0, 1, 2, 3)) == ()
    assert found.total((0, 1, 2, 3)) == costs(problem(3, link=link)).total((0, 1, 2, 3))
    assert costs(problem(3), splitting=SPLITTING).interiors((0, 1, 2, 3)) == (1, 2)
    forced = costs(problem(3, link=link), splitting=SPLITTING.at([1]))
    assert forced.interiors((0, 1, 2, 3)) == (1,)


def without(found: Costs) -> Costs:
    arguments = found.problem, found.devices, found.grid, found.device_of_tile
    return Costs(*arguments, splitting=NEVER)


@settings(max_examples=examples_of(10), deadline=None)
@given(drawn_costs())
def test_overlap_is_never_slower_than_waiting_but_for_its_strips(found: Costs) -> None:
    arguments = found.problem, found.devices, found.grid, found.device_of_tile
    units = range(len(found.problem.network.units))
    wherever = Splitting(0.5, 0.0).at(units)
    decided, free, priced = (
        Costs(*arguments, splitting=s) for s in (Splitting(0.5, 0.0), FREE_STRIPS, wherever)
    )
    plain = without(found)
    for borders in groupings(len(found.problem.network.units)):
        if found.total(borders) == float("inf"):
            continue
        waiting = simulate(plain, borders)
        assert simulate(free, borders).seconds <= waiting.seconds * (1 + 1e-9)
        for overlapped in (free, decided):
            assert overlapped.total(borders) <= plain.total(borders) * (1 + 1e-9)
        chosen = Splitting(0.5, 0.0).at(decided.interiors(borders))
        assert simulate(Costs(*arguments, splitting=chosen), borders) == simulate(decided, borders)
        split = simulate(priced, borders)
        strips = sum(split.computing) - sum(waiting.computing)
        assert strips >= -1e-12
        assert split.seconds <= waiting.seconds + strips + 1e-9
        busiest = max(split.computing) + priced.fixed_seconds
        assert split.seconds >= busiest * (1 - 1e-9)
