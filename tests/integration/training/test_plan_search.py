"""Beside training a plan is searched for in a process of its own, on the fastest device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2ptrain.coordinator import plan_search
from p2ptrain.coordinator.plan_cluster import plan_household
from p2ptrain.coordinator.plan_question import PlanQuestion
from p2ptrain.plan.types.plan import Plan
from p2ptrain.process.child_process import Apart, Haste
from tests.support.memory_household import MemoryHousehold
from tests.unit.coordinator.test_plan_search import (
    NAMES,
    REQUEST,
    ids_of,
    measured_household,
    mesh,
    routed,
)

__all__ = ["mesh"]


async def test_beside_training_a_process_of_the_fastest_finds_the_same(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hastes: list[Haste] = []

    async def apart(work: Callable[[Apart], Plan], haste: Haste) -> Plan:
        hastes.append(haste)
        return await real(work, Haste.PROMPT)  # how it rests is shown by `test_apart`

    real = plan_search.apart
    monkeypatch.setattr(plan_search, "apart", apart)
    searches = {name: routed(mesh[name]) for name in NAMES}
    household = measured_household(ids_of(mesh), b=0.2)
    plan = await searches["c"].plan(PlanQuestion(REQUEST, household), Haste.IDLE)
    assert hastes == [Haste.IDLE]  # the coordinator has not searched itself
    assert plan == plan_household(REQUEST, household)
