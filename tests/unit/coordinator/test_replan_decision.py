"""When another plan is looked for in earnest: a round is compared with what it could have been."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.coordinator.measured_cluster import MeasuredCluster
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.coordinator.plan_expectations import correct_profiles
from p2ptrain.coordinator.replan_decision import fixed_request, present_plan, wants_search
from p2ptrain.recovery.profile_corrections import ProfileCorrections
from tests.unit.coordinator.test_plan_cluster import household
from tests.unit.holder.planning.test_planner_client import REQUEST

PIPELINE = replace(REQUEST, planner="pp", batch_size=32, micro_batch=4)


def as_corrected(home: MeasuredCluster, units: tuple[float, ...]) -> MeasuredCluster:
    def now(device: str, measured: object) -> dict[str, object]:
        assert isinstance(measured, dict)
        return correct_profiles(measured, ProfileCorrections(units), device)

    candidates = [replace(c, measured=now(c.id, c.measured)) for c in home.candidates]
    return replace(home, candidates=candidates)


def test_a_plan_is_held_against_what_it_promised_for_the_work_that_there_is() -> None:
    """Half of the work behind the first stage is not there: rounds are hardly shorter, but the
    same devices could do with less time."""
    home = household(1.0, 1.0)
    plan = plan_cluster(PIPELINE, home)
    first, behind = (stage.units for stage in plan.stages)
    fewer = as_corrected(home, (1.0,) * first[1] + (0.5,) * (behind[1] - behind[0]))
    request = replace(fixed_request(PIPELINE, plan), planner="auto")

    by_time_alone = present_plan(request, fewer, plan)
    assert 0.85 < by_time_alone.slower <= 1.0
    assert not wants_search(request, by_time_alone, has_new=False)

    now = present_plan(request, fewer, plan, work=0.75)
    assert now.round_seconds == by_time_alone.round_seconds
    assert now.slower == pytest.approx(by_time_alone.slower / 0.75)
    assert wants_search(request, now, has_new=False)


@pytest.mark.parametrize(("work", "wanted"), [(1.15, False), (1.5, True), (0.6, True)])
def test_where_everything_takes_longer_or_less_links_weigh_otherwise(
    work: float, wanted: bool
) -> None:
    """Rounds are as slow as the work there is; what another kind of plan makes of it is open."""
    home = household(1.0, 1.0)
    plan = plan_cluster(PIPELINE, home)
    changed = as_corrected(home, (work,) * plan.stages[-1].units[1])
    request = replace(fixed_request(PIPELINE, plan), planner="auto")
    now = present_plan(request, changed, plan, work)
    assert now.slower == pytest.approx(1.0, abs=0.03)
    assert wants_search(request, now, has_new=False) is wanted
