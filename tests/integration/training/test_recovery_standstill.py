"""A stage that hangs, on a device that lives: nothing breaks, and nothing would ever end."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain import events, failpoints
from p2ptrain.events import Failure, Plan
from p2ptrain.failpoints import Reached
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.household import devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)
from tests.support.memory_household import memory_id


@pytest.mark.parametrize("times", [1, 2])
async def test_a_stage_that_hangs_is_begun_again_and_then_done_without(
    times: int,
) -> None:
    # all share one process here
    settings = RecoverySettings(quiet_seconds=0.3, quiet_cpu_seconds=1e9)
    wanted, job = undisturbed(momentum_job()), momentum_job()
    left = times

    def arm() -> None:
        failpoints.arm("forward.compute.after", hang, device=memory_id("b"), step=5)

    def hang(_: Reached) -> asyncio.Future[None]:
        nonlocal left
        left -= 1
        if left:
            arm()
        return asyncio.get_running_loop().create_future()

    async with devices(3, settings=settings) as household:
        arm()
        await household.holder_run(job, one_stage_each(3)).run()
        assert left == 0
        assert_undisturbed(household, job, wanted)
        assert not [event for event in household.events if isinstance(event, Failure)]
        told = [event.message for event in household.events if isinstance(event, events.Warning)]
        assert len(told) == times
        assert all("nothing moves any more" in message for message in told)
        plans = [event for event in household.events if isinstance(event, Plan)]
        used = [{d.name for stage in plan.stages for d in stage.devices} for plan in plans]
        assert used[:2] == [{"a", "b", "c"}] * 2
        assert all("b" not in names for names in used[2:])
        assert len(plans) == times + 1
