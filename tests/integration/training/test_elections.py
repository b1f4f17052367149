"""A change of coordinator ends no job: not while it is prepared, and not while it trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2ptrain.errors import NotCoordinator, PeerError
from p2ptrain.net.message import Message
from p2ptrain.observe.events import Event, PlanEvent, Step
from p2ptrain.training.assignment import Assignment
from p2ptrain.training.options import TrainOptions
from p2ptrain.training.protocol import CHANGE, MEASURE_PROFILE, PREPARE, SURVEY_LINKS
from tests.integration.training.group_plans import divided, force
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import make_job, on_step, undisturbed


def at_first(household: Devices, name: str, kind: str, act: Callable[[], None]) -> None:
    """Call `act` as the device gets its first message of that kind, before it is handled."""
    route = household.members[name].routes[kind]
    waiting = [act]

    async def handle(peer: str, message: Message) -> Message | None:
        if waiting:
            waiting.pop()()
        return await route.handler(peer, message)

    household.mesh[name].route(kind, handle, route.parts)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (SURVEY_LINKS, "b"),
        (CHANGE, "b"),
        (MEASURE_PROFILE, "a"),
        (MEASURE_PROFILE, "c"),
        (PREPARE, "a"),
        (PREPARE, "b"),
        (PREPARE, "c"),
    ],
)
async def test_an_election_while_a_job_is_prepared_makes_the_holder_ask_the_new_coordinator(
    kind: str, where: str
) -> None:
    async with devices(3) as household:
        household.mesh.elect("b")
        at_first(household, where, kind, lambda: household.mesh.elect("c"))
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        plans = [event for event in household.events if isinstance(event, PlanEvent)]
        assert [plan.reason for plan in plans] == ["start"]
        assert {d.name for stage in plans[0].stages for d in stage.devices} == {"a", "b", "c"}


@pytest.mark.parametrize("kind", [MEASURE_PROFILE, PREPARE])
async def test_a_coordinator_that_dies_while_a_job_is_prepared_is_replaced(kind: str) -> None:
    async with devices(4) as household:
        household.mesh.elect("d")
        killing: list[asyncio.Task[None]] = []

        def kill() -> None:
            killing.append(asyncio.create_task(household.mesh.kill("d")))

        at_first(household, "b", kind, kill)
        await household.holder_run(make_job(epochs=1)).run()
        await asyncio.gather(*killing)
        assert household.losses == undisturbed(make_job(), 3).losses
        used = {d.name for stage in household.plan.stages for d in stage.devices}
        assert used == {"a", "b", "c"}


async def test_devices_that_know_of_the_election_first_are_not_left_out() -> None:
    """The old coordinator hears of its end by their refusals."""
    async with devices(3) as household:
        household.mesh.elect("b")
        prepare = household.members["c"].routes[PREPARE]
        refusals = iter([True])

        async def refuse(peer: str, message: Message) -> Message | None:
            if next(refusals, False):
                asyncio.get_running_loop().call_later(0.05, household.mesh.elect, "c")
                raise NotCoordinator("a command of term 2; 3 is in force")
            return await prepare.handler(peer, message)

        household.mesh["c"].route(PREPARE, refuse, prepare.parts)
        await household.holder_run(make_job(epochs=1)).run()
        assert len(household.plan.stages) == 3


async def test_a_device_that_trains_refuses_a_plan_that_nobody_took_stock_for() -> None:
    async with devices(2) as household:
        service, kept = household.members["b"].service, []
        prepare = household.members["b"].routes[PREPARE]

        async def keep(peer: str, message: Message) -> Message | None:
            kept.append(message)
            return await prepare.handler(peer, message)

        household.mesh["b"].route(PREPARE, keep, prepare.parts)
        training = asyncio.Event()
        run = household.holder_run(make_job(epochs=500), None, on_step(household, 1, training.set))
        running = asyncio.create_task(run.run())
        await training.wait()
        ordered = Assignment.from_bytes(kept[0].parts[0])
        later = replace(ordered, key=replace(ordered.key, epoch=9))
        parts = (memoryview(later.to_bytes()), kept[0].parts[1])
        with pytest.raises(PeerError, match="take stock first"):
            await prepare.handler(
                household.mesh["a"].self_id, Message(PREPARE, kept[0].fields, parts)
            )
        assert service.engagement is not None
        assert service.engagement.assignment.key == ordered.key
        running.cancel()
        await asyncio.wait([running])


async def test_a_link_to_the_coordinator_that_breaks_makes_the_holder_ask_again() -> None:
    """It coordinates on: no news of an election will ever come."""
    async with devices(3) as household:
        mesh = household.mesh
        mesh.elect("b")
        at_first(household, "c", PREPARE, lambda: mesh.cut(mesh["a"], mesh["b"], "pulled"))
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        assert {d.name for stage in household.plan.stages for d in stage.devices} == {"a", "b", "c"}


@pytest.mark.parametrize("kind", [PlanEvent, Step])
async def test_a_coordinator_without_a_part_may_die_before_the_first_round_and_after(
    monkeypatch: pytest.MonkeyPatch, kind: type[Event]
) -> None:
    force(monkeypatch, [divided(4), divided(4)])
    async with devices(3) as household:
        household.mesh.elect("c")
        killing: list[asyncio.Task[None]] = []

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, kind) and not killing:
                killing.append(asyncio.create_task(household.mesh.kill("c")))

        await household.holder_run(make_job(), TrainOptions(wait_for=3), listen).run()
        await asyncio.gather(*killing)
        assert household.mesh.coordinator.name == "a"
        assert household.losses == undisturbed(make_job()).losses
        assert len([event for event in household.events if isinstance(event, PlanEvent)]) == 1
