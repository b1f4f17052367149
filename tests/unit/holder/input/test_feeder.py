"""What is left of the loader where an epoch ends in the middle of feeding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
import torch

from p2ptrain.holder.input.feeder import Feeder
from p2ptrain.holder.input.loader import FeedItem
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.io.tensor_router import TensorRouter
from tests.support.memory_household import MemoryHousehold, memory_id

SAMPLES = 4


async def test_who_feeds_closes_what_it_feeds_from() -> None:
    """Else the loop closes it some day, in a task that nobody owns, beside the next epoch's."""
    is_closed = False
    asked = 0

    async def pieces() -> AsyncGenerator[FeedItem, None]:
        nonlocal is_closed, asked
        try:
            while True:
                asked += 1
                key = MicroBatchKey(0, asked)
                yield FeedItem(
                    MicroBatchSlice.whole(key, RoundMode.TRAIN, SAMPLES),
                    [torch.zeros(SAMPLES, 1)],
                    [],
                )
        finally:
            await asyncio.sleep(0)  # as a thread is waited for
            is_closed = True

    async with MemoryHousehold(["a", "b"]) as mesh:
        mesh.freeze("b")  # and so takes nothing
        device = memory_id("b")
        place = StageAssignment(0, 3, warmup=1, devices=(device,), shares=(SAMPLES,))
        at = Version(0, 0)
        assignment = Assignment(
            GenerationKey("job", 1), "a", "digest", (place,), SAMPLES, SAMPLES, SGD(), 0, False, at
        )
        before = asyncio.all_tasks()
        feeder = Feeder(assignment, [], TensorRouter(mesh["a"]))
        feeding = asyncio.create_task(feeder.run(pieces()))
        seen = -1
        while asked != seen:  # until its queue is full
            seen = asked
            for _ in range(10):
                await asyncio.sleep(0)
        feeding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await feeding
        assert is_closed
        assert asyncio.all_tasks() == before
