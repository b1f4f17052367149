"""A device that is there and does not do what it is asked for costs seconds, and is named."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest

from p2ptrain import events
from p2ptrain.events import Event, Plan, Step
from p2ptrain.messages.kinds import (
    ALIVE,
    MEASURE_LINKS,
    MEASURE_PROFILE,
    PREPARE,
    STATE_MANIFEST,
    STATE_REPORT,
)
from p2ptrain.net.message import Message
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.recovery.work_signs import TALKS, SignLimits
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    assert_undisturbed,
    make_job,
    momentum_job,
    one_stage_each,
    undisturbed,
)

QUICK = RecoverySettings(
    work_limits=SignLimits(look_seconds=0.05, silent_seconds=0.5, still_seconds=0.6),
    talk_limits=replace(TALKS, look_seconds=0.05, silent_seconds=0.5),
    silence_look_seconds=0.1,
    answer_seconds=0.2,
)


def hang(household: Devices, name: str, kinds: Collection[str] = ()) -> None:
    """From now on it accepts what it is asked for and never answers; all kinds of a job or some."""
    router = household.mesh[name].router
    put = router.put

    def lost(peer: str, message: Message) -> bool:
        hangs = message.kind in kinds or (not kinds and not message.kind.startswith("mesh."))
        return True if hangs else put(peer, message)

    router.put = lost


def _warned(household: Devices) -> list[str | None]:
    return [event.name for event in household.events if isinstance(event, events.Warning)]


def _used(plan: Plan) -> set[str]:
    return {device.name for stage in plan.stages for device in stage.devices}


@pytest.mark.parametrize(
    ("coordinator", "kinds"),
    [
        ("b", ()),
        ("c", (STATE_REPORT,)),
        ("c", (PREPARE,)),
        ("b", (MEASURE_LINKS,)),
        ("c", (PREPARE, ALIVE)),
    ],
)
async def test_one_that_hangs_as_a_job_begins_is_named_and_left_out(
    coordinator: str, kinds: tuple[str, ...]
) -> None:
    async with devices(3, settings=QUICK) as household:
        household.mesh.elect(coordinator)
        hang(household, "b", kinds)
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        assert _warned(household) == ["b"]
        assert _used(household.plan) == {"a", "c"}


async def test_one_that_hangs_as_it_is_measured_is_left_out() -> None:
    async with devices(3, settings=QUICK) as household:
        hang(household, "b", (MEASURE_PROFILE, ALIVE))
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        assert _warned(household) == ["b"]


async def test_one_that_hangs_while_it_trains_is_named_and_planned_around() -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=QUICK) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 3:
                hang(household, "b")

        await household.holder_run(job, one_stage_each(3), listen).run()
        assert_undisturbed(household, job, wanted)
        assert _warned(household) == ["b"]
        assert _used(household.plan) == {"a", "c"}


async def test_one_that_hangs_as_its_weights_go_home_is_done_without() -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3, settings=QUICK) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == len(wanted.losses):
                hang(household, "b", (STATE_MANIFEST, ALIVE))

        await household.holder_run(job, one_stage_each(3), listen).run()
        assert_undisturbed(household, job, wanted)
        assert _warned(household) == ["b"]


async def test_one_that_takes_long_is_waited_for() -> None:
    """Its thread computes for several times as long as a device may do nothing."""
    limits = replace(QUICK.work_limits, silent_seconds=0.4, still_seconds=0.1)
    settings = replace(QUICK, work_limits=limits)
    async with devices(2, settings=settings) as household:
        service, prepare = household.members["b"].service, household.members["b"].routes[PREPARE]

        async def slowly(peer: str, message: Message) -> Message | None:
            released = asyncio.Event()
            asyncio.get_running_loop().call_later(0.6, released.set)
            loop = asyncio.get_running_loop()
            await service.compute.run(
                (0,), lambda: asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
            )
            return await prepare.handler(peer, message)

        household.mesh["b"].route(PREPARE, slowly, prepare.parts)
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        assert _warned(household) == []
        assert _used(household.plan) == {"a", "b"}
