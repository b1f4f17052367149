"""Weights that take long to arrive: who waits for them sees that they come."""

from __future__ import annotations

import asyncio

from p2ptrain import failpoints
from p2ptrain.failpoints import Reached
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.kinds import ALIVE
from p2ptrain.net.message import Message
from tests.integration.training.household import devices
from tests.integration.training.jobs import make_job
from tests.support.memory_household import memory_id


async def test_a_device_says_how_much_of_its_part_has_arrived() -> None:
    told: list[int] = []

    async with devices(2) as household:

        async def ask() -> None:
            alive = Message(ALIVE)
            reply = await household.mesh["a"].call(memory_id("b"), alive, timeout_seconds=10.0)
            told.append(reply.fields["fetched_bytes"])

        def fetched(_: Reached) -> asyncio.Future[None]:
            return asyncio.ensure_future(ask())

        failpoints.arm("fetch.between", fetched, device=memory_id("b"))
        options = TrainOptions(wait_for=2, planner="pp", steps=3)
        await household.holder_run(make_job(), options).run()
        assert len(household.losses) == 3
    assert len(told) == 1
    assert told[0] > 0
