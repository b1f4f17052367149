"""Whole searches for another plan, of households in which one device dies."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.check_plan import check_plan
from p2ptrain.plan.replan.migration import PAUSE_TOLERANCE
from p2ptrain.plan.replan.replan import living_cluster, replan
from p2ptrain.plan.replan.replica_holders import place_replicas
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support.thorough import examples_of
from tests.unit.plan.replan.test_replan import REQUEST, SOON, TWELVE, five


@settings(max_examples=examples_of(5), deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=5, max_size=5), st.integers(0, 3))
def test_in_a_pause_no_more_is_lost_than_by_the_usual_plan(
    slowdowns: list[float], stage: int
) -> None:
    cluster = five(slowdowns)
    plan = make_plan(TWELVE, cluster, REQUEST)
    gone = plan.stages[min(stage, len(plan.stages) - 1)].devices[0].name
    assume(gone != "a" and len(plan.stages) > 1)
    held = place_replicas(plan).without([gone])
    usual = replan(TWELVE, cluster, plan, REQUEST, dead=[gone], replicas=held, planner=make_plan)
    soon = replan(
        TWELVE, cluster, plan, REQUEST, dead=[gone], repay_seconds=SOON, planner=make_plan
    )
    check_plan(soon.plan, TWELVE, living_cluster(cluster, [gone]), private=False)
    slower = soon.plan.predicted.round_seconds / usual.plan.predicted.round_seconds - 1
    assert slower <= PAUSE_TOLERANCE
    assert soon.migration.seconds + SOON * slower <= usual.migration.seconds + SOON * 0.01 + 1e-9
