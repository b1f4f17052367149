"""A device's load and its interfaces' seconds, beside what a simulated round counts."""

from __future__ import annotations

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import device_loads, message_seconds, place_seconds
from p2ptrain.plan.simulation.bound import InterfaceLoads, round_interfaces
from p2ptrain.plan.simulation.simulate import draft_of, simulate
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.planning_examples import household, quick_request


@pytest.mark.parametrize("planner", ["pp", "dp", "pipedream", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_a_load_is_what_the_device_is_busy_for(planner: str, seed: int) -> None:
    profile, cluster = household(seed, 8, 4)
    plan = make_plan(profile, cluster, quick_request(batch_size=30, planner=planner))
    cost = CostModel(profile, cluster)
    loads = device_loads(cost, draft_of(plan, cost))
    busy = simulate(plan, profile, cluster).busy_seconds
    assert {cost.name(device): load for device, load in loads.items()} == pytest.approx(
        {name: busy[name] for name in plan.device_names}
    )
    assert round_interfaces(cost, draft_of(plan, cost)).longest <= plan.predicted.round_seconds


def test_messages_are_the_part_of_a_load_that_overlap_adds() -> None:
    profile, cluster = household(1, 8, 3)
    plan = make_plan(profile, cluster, quick_request(batch_size=30, planner="hybrid"))
    plain, overlap = CostModel(profile, cluster), CostModel(profile, cluster, overlap=True)
    draft = draft_of(plan, plain)
    for group, units in zip(draft.groups, draft.units, strict=True):
        for place in range(len(group.devices)):
            seat = draft.split, group, place, units
            messages = message_seconds(overlap, *seat)
            assert messages > 0 == message_seconds(plain, *seat)
            assert place_seconds(overlap, *seat) - messages == pytest.approx(
                place_seconds(plain, *seat)
            )


def test_what_goes_out_comes_in_and_nothing_goes_to_oneself() -> None:
    profile, cluster = household(2, 3, 3)
    cost = CostModel(profile, cluster)
    found = InterfaceLoads(cost)
    found.carry(0, 0, 1e9)
    assert found.longest == 0.0
    found.carry(0, 1, 1e6)
    found.carry(1, 0, 1e6)
    there, back = (1e6 / cost.link(*ends).bytes_per_s for ends in ((0, 1), (1, 0)))
    assert (found.up[0], found.down[1]) == (there, there)
    assert (found.up[1], found.down[0]) == (back, back)
    assert found.of(0) == found.longest == max(there, back)
