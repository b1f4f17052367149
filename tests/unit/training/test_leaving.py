"""Devices that tell the holder that they leave, and wait for its word."""

from __future__ import annotations

import asyncio

from p2ptrain.mesh.memory import MemoryHousehold
from p2ptrain.net.message import Message
from p2ptrain.training.elastic import Elasticity, Household
from p2ptrain.training.protocol import LEAVING
from p2ptrain.training.recovery import holder_events as holder
from p2ptrain.training.recovery.change import Reason
from tests.unit.training.test_memory_needs import request


async def test_a_device_that_died_while_it_waited_may_leave_again() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        wanted: asyncio.Queue[holder.Wanted] = asyncio.Queue()
        elasticity = Elasticity(
            mesh["a"],
            request(),
            Household(frozenset, dict, lambda: None, lambda: 9),
            wanted.put_nowait,
            replans=True,
        )
        elasticity.start()
        device, leaving = mesh["b"].self_id, Message(LEAVING, {"job": "j"})
        for _ in range(2):
            asked = mesh["b"].call(mesh["a"].self_id, leaving, timeout_seconds=30.0)
            leaves = asyncio.create_task(asked)
            assert await wanted.get() == holder.Wanted(Reason.LEAVE, device)
            elasticity.note(holder.Died(device, certain=True))
            await leaves  # so that no process waits for a word to the one before it
            elasticity.note(holder.Appeared(device))
        elasticity.close()
