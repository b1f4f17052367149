"""Annealing: never slower than where it began, the same each time, within rules and budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.plan.cost.cost_model import CostModel
from p2ptrain.plan.cost.draft import alone, draft_groups
from p2ptrain.plan.problem.judge import Judge, Judged
from p2ptrain.plan.problem.question import Question
from p2ptrain.plan.search.annealing import annealed, annealing_tasks
from p2ptrain.plan.simulation.simulate import simulate_draft
from p2ptrain.plan.types.allocation import Allocation, BatchSplit
from p2ptrain.plan.types.cluster import Cluster
from tests.support import planning_examples

SPLIT = BatchSplit(64, 8)


def question(seed: int, units: int = 8, devices: int = 4, **changes: object) -> Question:
    profile, cluster = planning_examples.household(seed, units, devices)
    first, *others = cluster.devices
    small = (replace(device, memory_bytes=1_500_000) for device in others)
    cluster = Cluster((first, *small), cluster.default_link, cluster.links)
    judge = Judge(CostModel(profile, cluster, overlap=False), 20_000)
    asked = Question(judge, [SPLIT], tuple(range(devices)), min_micro_batch=1)
    return replace(asked, **changes)  # type: ignore[arg-type]


def on_one_device(asked: Question) -> Judged:
    """The whole model on the first device that can hold it."""
    cost = asked.cost
    for device in asked.devices:
        draft = draft_groups(cost, SPLIT, (0, cost.unit_count), [alone(SPLIT, device)])
        if draft is not None:
            return asked.judge.exact(draft)
    pytest.skip("no device can hold this model alone")


@given(seed=st.integers(0, 10_000), groups=st.booleans(), deals=st.booleans())
def test_it_is_never_slower_and_obeys_the_rules(seed: int, groups: bool, deals: bool) -> None:
    how = Allocation.MICRO_BATCHES if deals else Allocation.SAMPLES
    asked = question(seed, groups=groups, allocations=frozenset({how}))
    asked.judge.budget_tasks = 800
    start = on_one_device(asked)
    found = annealed(asked, asked.judge, start)
    assert found.seconds <= start.seconds
    assert found.draft == start.draft or asked.allow(found.draft)
    simulation = simulate_draft(asked.cost, found.draft)
    for device in asked.cost.devices:
        assert simulation.peak_bytes.get(device.name, 0) <= device.memory_bytes
    shared = [group for group in found.draft.groups if len(group.devices) > 1]
    assert groups or not shared
    assert all(group.allocation is how for group in shared)


def test_from_one_device_it_finds_the_way_to_many() -> None:
    asked = question(3)
    start = on_one_device(asked)
    found = annealed(asked, asked.judge, start)
    assert len(found.draft.devices) > 1
    assert found.seconds < start.seconds


def test_the_same_question_has_the_same_answer() -> None:
    answers = [annealed(q, q.judge, on_one_device(q)) for q in (question(5), question(5))]
    assert answers[0] == answers[1]


def test_what_it_may_spend_grows_with_the_question_up_to_a_limit() -> None:
    assert annealing_tasks(question(1, devices=1)) == 0
    few, many = (annealing_tasks(question(1, units=12, devices=n)) for n in (2, 6))
    assert many > few > 0
    half = question(1, devices=3, effort=0.5)
    assert annealing_tasks(half) == annealing_tasks(replace(half, effort=1.0)) // 2
    assert annealing_tasks(question(1, units=2, devices=1)) == 0
