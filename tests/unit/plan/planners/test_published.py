"""What holds for every planner of the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.planners import published
from p2ptrain.plan.planners.data_parallel import judge_dp
from p2ptrain.plan.planners.ftpipehd import judge_ftpipehd
from p2ptrain.plan.planners.hybrid import judge_hybrid
from p2ptrain.plan.planners.pipedream import judge_pipedream
from p2ptrain.plan.problem.candidates import candidate_splits
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.types.cluster import Cluster
from p2ptrain.plan.types.profile import Profile
from p2ptrain.plan.types.request import PlanRequest
from p2ptrain.tiling.planning.make_plan import make_plan
from tests.support import planning_examples
from tests.support.planning_questions import sound_plan, tried
from tests.support.thorough import examples_of

JUDGES: Mapping[str, Callable[[Question], Judged | None]] = {
    "dp": judge_dp,
    "ftpipehd": judge_ftpipehd,
    "hybrid": judge_hybrid,
    "pipedream": judge_pipedream,
}

REQUESTS = st.builds(
    PlanRequest,
    batch_size=st.sampled_from([1, 5, 16]),
    micro_batch=st.sampled_from([None, 1, 4]),
    private=st.booleans(),
    groups=st.sampled_from([True, True, False]),
)


@pytest.mark.parametrize("planner", JUDGES)
@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(
    planning_examples.profiles(), planning_examples.clusters(most_devices=5), REQUESTS, st.randoms()
)
def test_plans_are_sound(
    planner: str, profile: Profile, cluster: Cluster, request: PlanRequest, random: Random
) -> None:
    """Units covered, memory kept, devices all used or explained, listing order irrelevant."""
    request = replace(request, planner=planner)
    plan = sound_plan(profile, cluster, request, random)
    if plan is None:
        return
    assert all(len(stage.devices) == 1 for stage in plan.stages) or request.groups
    memory = {device.name: device.memory_bytes for device in cluster.devices}
    assert all(memory[out.name] < planning_examples.PLENTY for out in plan.left_out)
    assert planner == "hybrid" or not plan.left_out


@pytest.mark.parametrize("planner", JUDGES)
@settings(max_examples=examples_of(5), deadline=None, derandomize=True)
@given(planning_examples.profiles(), planning_examples.clusters(), REQUESTS)
def test_a_judge_finds_what_the_planner_answers(
    planner: str, profile: Profile, cluster: Cluster, request: PlanRequest
) -> None:
    cost = CostModel(profile, cluster)
    question = Question(
        Judge(cost, 24_000),
        candidate_splits(cost, request),
        tuple(range(len(cost.devices))),
        private=request.private,
        groups=request.groups,
    )
    judged = JUDGES[planner](question)
    plan = tried(profile, cluster, replace(request, planner=planner))
    assert (judged is None) == (plan is None)
    if judged is not None and plan is not None:
        assert judged.seconds == plan.predicted.round_seconds


@pytest.mark.parametrize("planner", JUDGES)
def test_rounds_of_very_many_tasks_are_planned_too(
    planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all are too long to compare, the one of fewest micro-batches is taken."""
    monkeypatch.setattr(published, "MAX_TASKS", 1)
    profile, cluster = planning_examples.household(0, units=6, devices=3)
    assert make_plan(profile, cluster, PlanRequest(64, planner=planner)).micro_batches == 1


@pytest.mark.parametrize("planner", ["ftpipehd", "hybrid", "pipedream"])
def test_enough_memory_is_always_enough(planner: str) -> None:
    """A plan exists wherever there are units and samples for every device."""
    for seed in range(3):
        profile, cluster = planning_examples.household(seed, units=9, devices=5)
        for private in (False, True):
            request = PlanRequest(64, planner=planner, private=private)
            used = make_plan(profile, cluster, request).predicted.peak_bytes
            assert len(used) == 5
