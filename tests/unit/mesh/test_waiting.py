"""A device is planned with although its links come a moment after it."""

from __future__ import annotations

import asyncio

from p2ptrain.mesh.waiting import wait_until_linked
from tests.support.memory_household import MemoryHousehold


async def _household() -> MemoryHousehold:
    return MemoryHousehold(["a", "b"])


async def test_who_is_linked_waits_for_nothing() -> None:
    household = await _household()
    await wait_until_linked(household["a"], [household["a"].self_id, household["b"].self_id])


async def test_a_link_that_comes_ends_the_wait() -> None:
    household = await _household()
    household.cut_link("a", "b")
    others = [household["b"].self_id]
    waiting = asyncio.create_task(wait_until_linked(household["a"], others, seconds=60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    household.heal_link("a", "b")
    await asyncio.wait_for(waiting, 10)


async def test_a_link_that_does_not_come_is_not_waited_for_long() -> None:
    household = await _household()
    household.cut_link("a", "b")
    await wait_until_linked(household["a"], [household["b"].self_id], seconds=0.0)
    assert household["b"].self_id not in household["a"].connected
