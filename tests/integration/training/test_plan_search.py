"""Beside training a plan is searched for in a process of its own, on the fastest device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2ptrain.coordinator import service
from p2ptrain.coordinator.plan_cluster import plan_cluster
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import ChildProcess, SearchPriority
from tests.support.memory_household import MemoryHousehold
from tests.unit.holder.planning.test_planner_client import (
    NAMES,
    REQUEST,
    Asker,
    ids_of,
    measured_household,
    mesh,
    routed,
)

__all__ = ["mesh"]


async def test_beside_training_a_process_of_the_fastest_finds_the_same(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hastes: list[SearchPriority] = []

    async def apart(work: Callable[[ChildProcess], Plan], haste: SearchPriority) -> Plan:
        hastes.append(haste)
        return await real(work, SearchPriority.PROMPT)  # how it rests is shown by `test_apart`

    real = service.run_in_child
    monkeypatch.setattr(service, "run_in_child", apart)
    for name in NAMES:
        routed(mesh[name])
    household = measured_household(ids_of(mesh), b=0.2)
    asked = PlanQuestion(REQUEST, household)
    plan = await Asker(mesh["c"]).search(asked, SearchPriority.IDLE)
    assert hastes == [SearchPriority.IDLE]  # the coordinator has not searched itself
    assert plan == plan_cluster(REQUEST, household)
