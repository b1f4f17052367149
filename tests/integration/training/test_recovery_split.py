"""The network splits: at most the side with the data trains; the others wait, and are met again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2ptrain.errors import DeviceLost
from p2ptrain.events import Event, Failure, Plan, Step, Waiting
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.recovery.recovery_settings import RecoverySettings
from tests.integration.training.household import NO_FIRST_WEIGHTS, Devices, devices
from tests.integration.training.jobs import (
    STEPS,
    assert_undisturbed,
    momentum_job,
    on_step,
    one_stage_each,
    steps_of,
    undisturbed,
)
from tests.support.memory_household import MemoryHousehold

AT = 5
"""The step whose report the network does not outlive."""


def at_step(household: Devices, act: Callable[[], None]) -> Callable[[Event], None]:
    """A listener that has `act` happen just after step AT is reported."""
    return on_step(household, AT, lambda: asyncio.get_running_loop().call_soon(act))


SPLITS = {
    "one is cut off": ("d",),
    "two and two": ("cd",),
    "the data is alone": ("bcd",),
    "the coordinator is cut off": ("b",),
    "three parts": ("b", "cd"),
    "all alone": ("b", "c", "d"),
}


@pytest.mark.parametrize("groups", SPLITS.values(), ids=SPLITS)
async def test_the_side_with_the_data_goes_on_and_the_others_wait(groups: tuple[str, ...]) -> None:
    """R11; one-way splits and rings of majorities are in `tests/system/split_network.py`."""
    wanted = undisturbed(momentum_job())
    job, away = momentum_job(), set("".join(groups))
    async with devices(4) as household:
        mesh = household.mesh
        mesh.elect("b")
        split = at_step(household, lambda: mesh.partition(*groups))
        await household.holder_run(job, one_stage_each(4), split).run()
        assert_undisturbed(household, job, wanted)
        failures = {event.name for event in household.events if isinstance(event, Failure)}
        assert failures == away
        assert {device.name for stage in household.plan.stages for device in stage.devices} == (
            set("abcd") - away
        )
        await household.until_waiting(*away)
        assert sorted(household.waiting) == sorted((name, "a") for name in away)
        for name in set("bcd") - away:
            await household.until_idle(name)


def _without_c(
    household: Devices,
    meet: Callable[[], Coroutine[Any, Any, None]],
    back: list[asyncio.Task[None]],
) -> Callable[[Event], None]:
    """A listener that cuts c off at step AT; once the plan is without it, `back` has `meet`."""

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step) and event.step == AT:
            asyncio.get_running_loop().call_soon(household.mesh.partition, "c")
        if isinstance(event, Plan) and event.reason == "failure" and not back:
            back.append(asyncio.create_task(meet()))

    return listen


async def test_who_was_cut_off_is_let_go_when_it_is_back() -> None:
    """Training has gone on without it: what it kept is of no use."""
    async with devices(3) as household:
        mesh = household.mesh
        back: list[asyncio.Task[None]] = []

        async def meet() -> None:
            await household.until_waiting("c")
            mesh.heal()
            await household.until_idle("c")

        listen = _without_c(household, meet, back)
        await household.holder_run(momentum_job(), one_stage_each(3), listen).run()
        await back[0]
        assert steps_of(household) == list(range(1, STEPS + 1))
        assert household.waiting == [("c", "a")]


async def test_who_is_heard_of_before_there_is_a_link_is_let_go_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody could be informed at first: each must be, once it can."""
    told = asyncio.Event()
    begin_without = HolderGeneration.begin_without

    async def watched(generation: HolderGeneration, device: str) -> None:
        await begin_without(generation, device)
        told.set()

    monkeypatch.setattr(HolderGeneration, "begin_without", watched)
    async with devices(3) as household:
        mesh = household.mesh
        back: list[asyncio.Task[None]] = []
        goes_on = asyncio.Event()

        async def meet() -> None:
            await household.until_waiting("c")
            mesh.hear()
            await told.wait()
            assert household.members["c"].service.slot.waiting_for == "a"
            mesh.heal()
            await household.until_idle("c")
            assert household.members["c"].service.slot.waiting_for is None
            goes_on.set()

        listen = _without_c(household, meet, back)
        order = HolderGeneration.order

        async def gated(generation: HolderGeneration, what: RoundOrder) -> None:
            if what.round.step == STEPS - 1:
                await goes_on.wait()  # the job must not end before
            await order(generation, what)

        monkeypatch.setattr(HolderGeneration, "order", gated)
        await household.holder_run(momentum_job(), one_stage_each(3), listen).run()
        await back[0]
        assert steps_of(household) == list(range(1, STEPS + 1))


async def test_what_is_only_out_of_reach_is_waited_for() -> None:
    """Both sides say so, and after the split not one step is done again."""
    wanted = undisturbed(momentum_job())
    job = momentum_job()
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        mesh = household.mesh
        meeting: list[asyncio.Task[None]] = []

        async def meet() -> None:
            await household.until_waiting("b", "c")
            assert len(household.losses) <= AT + 1  # the round under way may have counted
            mesh.heal()

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == AT:
                asyncio.get_running_loop().call_soon(mesh.partition, "bc")
            if isinstance(event, Waiting):
                meeting.append(asyncio.create_task(meet()))

        await household.holder_run(job, one_stage_each(3), listen).run()
        await meeting[0]
        told = [event.waiting_for for event in household.events if isinstance(event, Waiting)]
        assert told == ["b, c"]
        assert sorted(household.waiting) == [("b", "a"), ("c", "a")]
        assert_undisturbed(household, job, wanted)
        for name in ("b", "c"):
            await household.until_idle(name)


async def test_what_turns_out_to_be_gone_ends_the_wait() -> None:
    async with devices(3, settings=NO_FIRST_WEIGHTS) as household:
        mesh = household.mesh
        ending: list[asyncio.Task[None]] = []

        async def end() -> None:
            for name in ("b", "c"):
                await mesh.kill(name)
                await household.restart(name)
            mesh.heal()

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == AT:
                asyncio.get_running_loop().call_soon(mesh.partition, "bc")
            if isinstance(event, Waiting) and not ending:
                ending.append(asyncio.create_task(end()))

        lost = r"b, c are gone.*, and \w+(\.\w+)* to \w+(\.\w+)* with them: layers \d+ to \d+"
        with pytest.raises(DeviceLost, match=lost):
            await household.holder_run(momentum_job(), one_stage_each(3), listen).run()
        await ending[0]


SHORT_GRACE = RecoverySettings(link_grace_seconds=0.1, relink_seconds=0.1)


async def test_devices_that_cannot_reach_each_other_do_not_share_a_plan() -> None:
    """A ring of four, each with two neighbours: nobody is dead, and not all can work together."""
    wanted = undisturbed(momentum_job())
    job = momentum_job()

    def ring(mesh: MemoryHousehold) -> None:
        mesh.cut_link("a", "c")
        mesh.cut_link("b", "d")

    async with devices(4, settings=SHORT_GRACE) as household:
        split = at_step(household, lambda: ring(household.mesh))
        await household.holder_run(job, one_stage_each(4), split).run()
        assert_undisturbed(household, job, wanted)
        used = {device.name for stage in household.plan.stages for device in stage.devices}
        assert used in ({"a", "b"}, {"a", "d"})
        left_out = {out.name: out.reason for out in household.plan.left_out}
        assert all("no link to" in reason for reason in left_out.values())


@pytest.mark.parametrize(("ends", "used", "left_out"), [("bc", "ac", "b"), ("ac", "ab", "c")])
async def test_two_that_never_reach_each_other_are_planned_around_and_named(
    ends: str, used: str, left_out: str
) -> None:
    """From the start: alive for all, by what the third says."""
    wanted = undisturbed(momentum_job())
    job = momentum_job()
    async with devices(3, settings=SHORT_GRACE) as household:
        household.mesh.cut_link(*ends)
        await household.holder_run(job, TrainOptions(wait_for=2, planner="pp")).run()
        assert_undisturbed(household, job, wanted)
        plan = household.plan
    assert {d.name for stage in plan.stages for d in stage.devices} == set(used)
    (other,) = set(ends) - {left_out}
    assert [(out.name, out.reason) for out in plan.left_out] == [(left_out, f"no link to {other}")]
