"""Where the order of a group's sums turns, so that the wire does not stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.simulation.allreduce import allreduce_turn
from p2ptrain.plan.simulation.simulate import draft_of
from p2ptrain.plan.types.cluster import ClusterLink
from p2ptrain.plan.types.gradient_sums import MIN_BYTES, TURNED_PART, USUAL
from tests.support import planning_examples
from tests.unit.plan.simulation.test_overlap import shared_plan

UNITS = 6
BACKWARD_SECONDS = 10.0


def turn(bucket_seconds: float, *, updates_ahead: bool = True) -> int | None:
    """Of one stage whose units have a bucket each."""
    profile = planning_examples.profile([(5.0, BACKWARD_SECONDS)] * UNITS)
    units = tuple(replace(unit, parameter_bytes=MIN_BYTES) for unit in profile.units)
    cluster = planning_examples.cluster("a", "b", link=ClusterLink(MIN_BYTES / bucket_seconds, 0.0))
    profile = replace(profile, units=units)
    cost = CostModel(profile, cluster, overlap=True, updates_ahead=updates_ahead)
    return allreduce_turn(cost, draft_of(shared_plan("a", "b", units=UNITS), cost), 0)


@pytest.mark.parametrize(
    ("bucket_seconds", "begun"),
    [
        (1.0, 5),  # each as soon as it is made; the first unit's when the backward is over
        (20.0, 4),  # at 10, 30 and 50 of 60 seconds, the third bucket being of two units
        (25.0, 2),
        (60.0, 1),
        (1000.0, 1),
    ],
)
def test_it_turns_where_the_wire_is_when_the_backward_is_over(
    bucket_seconds: float, begun: int
) -> None:
    assert turn(bucket_seconds) == UNITS - begun


def test_it_does_not_where_updates_wait_or_nobody_shares() -> None:
    assert turn(20.0, updates_ahead=False) is None
    profile = planning_examples.profile([(1.0, 1.0)] * 2, parameter_bytes=8)
    cluster = planning_examples.cluster("a", "b")
    plan = planning_examples.straight_plan(
        shared_plan("a", "b", units=2).split, ("a", (0, 1), 1), ("b", (1, 2), 1)
    )
    for overlap in (False, True):
        cost = CostModel(profile, cluster, overlap=overlap)
        assert [allreduce_turn(cost, draft_of(plan, cost), p) for p in (0, 1)] == [None, None]
    plain = CostModel(profile, cluster)
    assert allreduce_turn(plain, draft_of(shared_plan("a", "b", units=2), plain), 0) is None


def test_a_forward_waits_for_a_little_first_and_then_for_as_much_as_before() -> None:
    sizes, before = [], 0
    for _ in range(8):
        sizes.append(USUAL.turned_bytes(before))
        before += sizes[-1]
    assert sizes[:4] == [MIN_BYTES // TURNED_PART * k for k in (1, 1, 2, 4)]
    assert sizes[-1] <= 4 << 20
