"""A device that does not hold the job commands nobody, whether it coordinates or once did."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.errors import PeerError
from p2ptrain.events import Event, Failure, Recovered, Step
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.assign import Fetches
from p2ptrain.messages.assignment import Assignment
from p2ptrain.messages.kinds import PREPARE, STATE_REPORT
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.net.message import Message
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_server import TransferServer
from p2ptrain.worker import generation_builder
from tests.integration.training.household import Devices, devices, hold_rounds
from tests.integration.training.jobs import make_job, undisturbed
from tests.support.memory_household import memory_id

COMMANDS = 50


async def _command(household: Devices, number: int) -> None:
    """To stop, or to be made ready."""
    rng = random.Random(number)
    target = rng.choice("bc")
    hosted = household.members[target].service.slot.hosted
    assert hosted is not None
    assignment = hosted.assignment
    generation = rng.choice(
        [0, 1, assignment.key.generation, assignment.key.generation + rng.randrange(10_000)]
    )
    key = GenerationKey(assignment.key.job, generation)
    if rng.random() < 0.5:
        fields = {
            **key.fields(),
            "digest": assignment.digest,
            "alive": [memory_id(name) for name in "abcd"],
        }
        message = Message(STATE_REPORT, fields)
    else:
        stale = replace(assignment, key=key)
        parts = (memoryview(stale.to_bytes()), Fetches(()).to_part())
        message = Message(PREPARE, {"needed": {"compute_bytes": 0}}, parts)
    await household.mesh["d"].call(memory_id(target), message, timeout_seconds=10)


async def test_a_thawed_coordinator_is_refused_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: of 50 commands none is obeyed."""
    options = TrainOptions(wait_for=4, planner="pp")
    job = make_job(epochs=25)
    wanted = undisturbed(make_job(epochs=25), 75)
    frozen: list[asyncio.Task[None]] = []
    refused = 0

    async with devices(4) as household:
        mesh = household.mesh
        mesh.elect("d")
        hold_rounds(monkeypatch, 70, lambda: refused == COMMANDS or any(t.done() for t in frozen))

        async def go_on() -> None:
            nonlocal refused
            await mesh.thaw("d", informed=False)
            assert mesh["d"].coordinator is not None
            assert mesh["d"].coordinator.name == "d"
            for number in range(COMMANDS):
                with pytest.raises(PeerError):
                    await _command(household, number)
                refused += 1

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step) and event.step == 3:
                mesh.freeze("d")
                asyncio.get_running_loop().call_soon(mesh.declare_dead, "d")
            if isinstance(event, Recovered):
                frozen.append(asyncio.create_task(go_on()))

        run = household.holder_run(job, options, listen)
        await run.run()
        await frozen[0]
        assert refused == COMMANDS
        assert [e.name for e in household.events if isinstance(e, Failure)] == ["d"]
        assert household.losses == wanted.losses
        assert len([e for e in household.events if isinstance(e, Recovered)]) == 1


async def test_nothing_of_a_refused_command_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whose job it is, nor that what is being made ready is only to be gathered."""
    fetch = generation_builder.fetch_units
    refused: list[str] = []

    async with devices(3) as household:
        mesh, service = household.mesh, household.members["b"].service

        async def command(assignment: Assignment) -> None:
            key = replace(assignment.key, generation=0)
            about = {"digest": "0" * 64, "alive": []}
            stale = replace(assignment, key=key)
            parts = (memoryview(stale.to_bytes()), Fetches(()).to_part())
            for message in (
                Message(STATE_REPORT, {**key.fields(), **about}),
                Message(PREPARE, {"needed": {"compute_bytes": 0}, "gather": True}, parts),
            ):
                with pytest.raises(PeerError):
                    await mesh["c"].call(memory_id("b"), message, timeout_seconds=10)
                refused.append(message.kind)

        async def interrupted(
            mesh: Mesh, states: TransferServer, assignment: Assignment, *given: Any, **named: Any
        ) -> StoredTensors:
            if mesh.self_id == memory_id("b") and not refused:
                await command(assignment)
                assert service.slot.holder == memory_id("a")
            return await fetch(mesh, states, assignment, *given, **named)

        monkeypatch.setattr(generation_builder, "fetch_units", interrupted)
        options = TrainOptions(wait_for=3, planner="pp", steps=2)
        await household.holder_run(make_job(), options).run()
        assert refused == [STATE_REPORT, PREPARE]
        assert len(household.losses) == 2
