"""A device dies in the middle of training: the others go on, and nothing in the result shows it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from p2ptrain.errors import TrainingError
from p2ptrain.events import Event, Failure, Plan, Recovered, Step
from p2ptrain.job.job import Job
from p2ptrain.job.train_options import ReplanMethod
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.jobs import (
    STEPS,
    assert_undisturbed,
    momentum_job,
    one_stage_each,
    undisturbed,
)


async def with_kills(
    household: Devices,
    job: Job,
    kills: dict[int, list[str]],
    recovery: ReplanMethod = ReplanMethod.LIGHT,
) -> None:
    """Train while devices die, by the step whose report they do not outlive."""
    killing: list[asyncio.Task[None]] = []

    def listen(event: Event) -> None:
        household.events.append(event)
        if isinstance(event, Step):
            dying = kills.pop(event.step, [])
            killing.extend(asyncio.create_task(household.mesh.kill(name)) for name in dying)

    options = replace(one_stage_each(len(household.names)), recovery=recovery)
    await household.holder_run(job, options, listen).run()
    await asyncio.gather(*killing)


@pytest.mark.parametrize("name", ["b", "c"])
async def test_training_goes_on_without_a_dead_device_bit_by_bit(name: str) -> None:
    wanted = undisturbed(momentum_job())
    job = momentum_job()
    async with devices(3) as household:
        await with_kills(household, job, {5: [name]})
        events = household.events
        assert_undisturbed(household, job, wanted)
        assert [e.name for e in events if isinstance(e, Failure)] == [name]
        plans = [e for e in events if isinstance(e, Plan)]
        assert [plan.reason for plan in plans] == ["start", "failure"]
        assert plans[1].epoch > plans[0].epoch
        assert {d.name for s in plans[1].stages for d in s.devices} == {"a", "b", "c"} - {name}
        (recovered,) = (e for e in events if isinstance(e, Recovered))
        assert recovered.epoch == plans[1].epoch
        assert recovered.replayed_steps <= 5  # what the device had is kept elsewhere
        for survivor in {"a", "b", "c"} - {name}:
            await household.until_idle(survivor)


@pytest.mark.parametrize(
    "kills",
    [
        {1: ["b"]},
        {5: ["b", "c"]},
        {4: ["b"], 7: ["c"]},
        {STEPS - 1: ["c"]},
        {STEPS: ["b"]},
    ],
)
async def test_whichever_device_dies_and_whenever_the_curve_is_the_same(
    kills: dict[int, list[str]],
) -> None:
    wanted = undisturbed(momentum_job())
    job = momentum_job()
    dead = {name for names in kills.values() for name in names}
    async with devices(3) as household:
        await with_kills(household, job, dict(kills))
        events = household.events
        assert_undisturbed(household, job, wanted)
        assert {e.name for e in events if isinstance(e, Failure)} <= dead
        for survivor in {"a", "b", "c"} - dead:
            await household.until_idle(survivor)


@pytest.mark.parametrize("recovery", ReplanMethod)
async def test_every_way_to_plan_after_a_failure_has_the_same_result(
    recovery: ReplanMethod,
) -> None:
    wanted, job = undisturbed(momentum_job()), momentum_job()
    async with devices(3) as household:
        await with_kills(household, job, {5: ["b"]}, recovery)
        assert_undisturbed(household, job, wanted)
        (recovered,) = (e for e in household.events if isinstance(e, Recovered))
        assert recovered.version == 5 - recovered.replayed_steps
        assert 0 < recovered.resumed_seconds <= recovered.seconds
        # otherwise the neighbour may have a copy of all it takes over
        assert recovered.moved_bytes > 0 or recovery is not ReplanMethod.HEAVY
        used = [d.name for stage in household.plan.stages for d in stage.devices]
        assert used == ["a", "c"] or recovery is not ReplanMethod.RESPIPE
        assert "b" not in used


async def test_the_coordinator_may_die_with_a_part_of_the_model() -> None:
    wanted = undisturbed(momentum_job())
    job = momentum_job()
    async with devices(3) as household:
        household.mesh.elect("c")
        await with_kills(household, job, {6: ["c"]})
        assert_undisturbed(household, job, wanted)
        assert household.mesh.coordinator.name == "a"


async def test_a_broken_link_costs_the_round_under_way_and_nothing_else() -> None:
    """Everyone lives: the same plan goes on from what everyone has."""
    wanted = undisturbed(momentum_job())
    job = momentum_job()
    async with devices(3) as household:
        mesh = household.mesh

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 5:
                mesh.cut(mesh["a"], mesh["b"], "pulled")

        await household.holder_run(job, one_stage_each(3), listen).run()
        events = household.events
        assert_undisturbed(household, job, wanted)
        assert not [e for e in events if isinstance(e, Failure)]
        first, second = (e for e in events if isinstance(e, Plan))
        assert second.stages == first.stages
        assert second.epoch > first.epoch
        (recovered,) = (e for e in events if isinstance(e, Recovered))
        assert recovered.replayed_steps <= 1  # the step of the report may not have been made yet


async def test_a_part_that_ends_every_device_that_computes_it_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the household, one after the other."""
    hold_rounds(monkeypatch, 0, lambda: False)
    killing: dict[str, asyncio.Task[None]] = {}
    async with devices(5) as household:

        def listen(event: Event) -> None:
            if isinstance(event, Plan):
                (victim,) = event.stages[-1].devices
                killing[victim.name] = asyncio.create_task(household.mesh.kill(victim.name))

        with pytest.raises(
            TrainingError, match=r"layers? .* ended p2ptrain on 2 devices .* \(\w, \w\),"
        ):
            await household.holder_run(momentum_job(), one_stage_each(5), listen).run()
        await asyncio.gather(*killing.values())
        assert len(killing) == 2
        for survivor in set("abcde") - killing.keys():
            await household.until_idle(survivor)
