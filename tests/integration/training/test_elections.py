"""Whatever becomes of the coordinator ends no job: neither as it is prepared, nor as it trains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain import events
from p2ptrain.coordinator import service
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.errors import InternalError, PeerError, PlanError
from p2ptrain.events import Event, Plan, Step
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.kinds import MEASURE_LINKS, MEASURE_PROFILE, PLAN, PREPARE
from p2ptrain.net import cbor
from p2ptrain.net.message import Message
from p2ptrain.recovery.recovery_settings import RecoverySettings
from p2ptrain.recovery.work_signs import PLANS
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
        (MEASURE_LINKS, "b"),
        (PLAN, "b"),
        (MEASURE_PROFILE, "a"),
        (MEASURE_PROFILE, "c"),
        (PREPARE, "a"),
        (PREPARE, "b"),
        (PREPARE, "c"),
    ],
)
async def test_an_election_while_a_job_is_prepared_changes_nothing(kind: str, where: str) -> None:
    async with devices(3) as household:
        household.mesh.elect("b")
        at_first(household, where, kind, lambda: household.mesh.elect("c"))
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        plans = [event for event in household.events if isinstance(event, Plan)]
        assert [plan.reason for plan in plans] == ["start"]
        assert {d.name for stage in plans[0].stages for d in stage.devices} == {"a", "b", "c"}


@pytest.mark.parametrize("kind", [MEASURE_PROFILE, PREPARE])
async def test_a_coordinator_that_dies_while_a_job_is_prepared_is_missed_by_nobody(
    kind: str,
) -> None:
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


async def test_an_earlier_attempt_that_is_still_measuring_stops_no_later_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searching, measured = asyncio.Event(), asyncio.Event()
    attempts: list[ClusterProfiler] = []
    profile, search = ClusterProfiler.profile, service.run_in_child

    async def slow_at_first(profiler: ClusterProfiler, *asked: Any) -> Any:
        attempts.append(profiler)
        is_first = len(attempts) == 1
        answers = await profile(profiler, *asked)
        if is_first:
            await searching.wait()
            measured.set()
        return answers

    async def slow(*asked: Any) -> Any:
        searching.set()
        await measured.wait()
        await asyncio.sleep(0.3)  # in which the first attempt would ask as well
        return await search(*asked)

    monkeypatch.setattr(ClusterProfiler, "profile", slow_at_first)
    monkeypatch.setattr(service, "run_in_child", slow)
    async with devices(4) as household:
        household.mesh.elect("d")
        killing: list[asyncio.Task[None]] = []
        at_first(
            household,
            "b",
            MEASURE_PROFILE,
            lambda: killing.append(asyncio.create_task(household.mesh.kill("d"))),
        )
        async with asyncio.timeout(30):
            await household.holder_run(make_job(epochs=1)).run()
        await asyncio.gather(*killing)
        assert len(attempts) == 2
        assert household.losses == undisturbed(make_job(), 3).losses


Answer = Callable[[str, Message], Awaitable[Message | None]]


async def _never(_peer: str, _message: Message) -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def _wrong(_peer: str, _message: Message) -> Message:
    raise InternalError("a bug")


async def _no_plan(_peer: str, _message: Message) -> Message:
    raise PlanError("nothing fits")


def _plan(change: Callable[[dict[str, Any]], object]) -> Callable[[Answer], Answer]:
    """An answer with a plan that was right before `change`."""

    def answers(right: Answer) -> Answer:
        async def answer(peer: str, message: Message) -> Message:
            reply = await right(peer, message)
            assert reply is not None
            plan = cbor.loads(bytes(reply.parts[0]), 1 << 20)
            change(plan)
            return Message(PLAN, {}, (memoryview(cbor.dumps(plan)),))

        return answer

    return answers


BAD: dict[str, Callable[[Answer], Answer]] = {
    "never": lambda _: _never,
    "error": lambda _: _wrong,
    "no plan": lambda _: _no_plan,
    "list": _plan(lambda plan: plan.update(planner=["pp"])),
    "empty": _plan(dict.clear),
    "half": _plan(lambda plan: plan["stages"].pop()),
    "strangers": _plan(lambda plan: plan["stages"][0]["devices"][0].update(name="x")),
    "escape": _plan(lambda plan: plan.update(mode_reason="\x1b[2J")),
    "memory": _plan(lambda plan: plan["predicted"].update(peak_bytes={"a": 1 << 60})),
}


@pytest.mark.parametrize("how", BAD)
async def test_a_coordinator_that_gives_no_plan_is_named_and_passed_over(
    how: str,
) -> None:
    """What it answers ends nothing, and the devices of the job follow another one."""
    settings = RecoverySettings(plan_limits=replace(PLANS, look_seconds=0.1, still_seconds=0.3))
    async with devices(3, settings=settings) as household:
        household.mesh.elect("b")
        right = household.members["b"].routes[PLAN]
        household.mesh["b"].route(PLAN, BAD[how](right.handler), right.parts)
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        warned = [event.message for event in household.events if isinstance(event, events.Warning)]
        assert [message.split(":")[0].split(",")[0] for message in warned] == ["b"]
        followed = household.mesh["c"].coordinator
        assert followed is not None
        assert followed.name != "b"


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
        later = replace(ordered, key=replace(ordered.key, generation=9))
        parts = (memoryview(later.to_bytes()), kept[0].parts[1])
        with pytest.raises(PeerError, match="ask for its state report first"):
            await prepare.handler(
                household.mesh["a"].self_id, Message(PREPARE, kept[0].fields, parts)
            )
        assert service.slot.hosted is not None
        assert service.slot.hosted.assignment.key == ordered.key
        running.cancel()
        await asyncio.wait([running])


async def test_a_link_to_the_coordinator_that_breaks_is_not_waited_for() -> None:
    """It coordinates on: no news of an election will ever come."""
    async with devices(3) as household:
        mesh = household.mesh
        mesh.elect("b")
        at_first(household, "c", PREPARE, lambda: mesh.cut(mesh["a"], mesh["b"], "pulled"))
        await household.holder_run(make_job(epochs=1)).run()
        assert household.losses == undisturbed(make_job(), 3).losses
        assert {d.name for stage in household.plan.stages for d in stage.devices} == {"a", "b", "c"}


@pytest.mark.parametrize("kind", [Plan, Step])
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
        assert len([event for event in household.events if isinstance(event, Plan)]) == 1
