"""Rounds in two phases: all are ready, the update counts, all apply it. On devices in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.events import Event, Step
from p2ptrain.messages.kinds import COMMIT, DONE, STATE_MANIFEST
from p2ptrain.messages.round_orders import Commit
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.net.message import Message
from p2ptrain.recovery.version import Version
from p2ptrain.worker.hosted_stages import HostedStages
from tests.integration.training.household import Devices, devices
from tests.integration.training.jobs import (
    assert_same_weights,
    make_job,
    on_step,
    one_stage_each,
    steps_of,
    undisturbed,
)
from tests.support.memory_household import MemoryMesh

Send: TypeAlias = Callable[[MemoryMesh, str, Message], Awaitable[None]]


def spy(monkeypatch: pytest.MonkeyPatch, on_send: Callable[[Send], Send]) -> None:
    """Let `on_send` see, keep or delay what devices of a later household send."""
    send = MemoryMesh.send

    async def watched(mesh: MemoryMesh, peer: str, message: Message, *rest: Any) -> None:
        async def pass_on(mesh: MemoryMesh, peer: str, message: Message) -> None:
            await send(mesh, peer, message, *rest)

        await on_send(pass_on)(mesh, peer, message)

    monkeypatch.setattr(MemoryMesh, "send", watched)


def engagement_of(household: Devices, name: str) -> HostedStages:
    hosted = household.members[name].service.slot.hosted
    assert hosted is not None
    return hosted


async def test_an_update_is_reported_once_all_are_ready_and_before_anybody_applies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []
    receivers: list[str] = []
    pipeline: list[str] = []

    def on_send(pass_on: Send) -> Send:
        async def send(mesh: MemoryMesh, peer: str, message: Message) -> None:
            if message.kind in (DONE, COMMIT):
                seen.append((message.kind, message.fields["round"]))
            if message.kind == COMMIT:
                receivers.append(peer)
            await pass_on(mesh, peer, message)

        return send

    spy(monkeypatch, on_send)
    async with devices(3) as household:

        def listen(event: Event) -> None:
            household.events.append(event)
            if isinstance(event, Step):
                seen.append(("step", event.step - 1))
                for name in household.names:
                    hosted = engagement_of(household, name)
                    pipeline[:] = hosted.assignment.devices
                    for executor in hosted.executors.values():
                        assert executor.live.version.step == event.step - 1
                        assert executor.live.ready == Version(event.step, 1)

        run = household.holder_run(make_job(), one_stage_each(3, 4), listen)
        await run.run()
    for number in range(4):
        kinds = [kind for kind, index in seen if index == number]
        assert kinds == [DONE] * 3 + ["step"] + [COMMIT] * 3
    assert receivers == pipeline[::-1] * 4, "who has waited longest first"


async def test_what_is_read_in_the_end_waits_for_the_last_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages of different kinds overtake one another."""
    late: list[asyncio.Task[None]] = []
    held: dict[str, Callable[[], Awaitable[None]]] = {}

    def on_send(pass_on: Send) -> Send:
        async def deliver_late(peer: str) -> None:
            for _ in range(50):
                await asyncio.sleep(0)
            await held.pop(peer)()

        async def send(mesh: MemoryMesh, peer: str, message: Message) -> None:
            if message.kind == COMMIT and message.fields["step"] == 2:
                held[peer] = lambda: pass_on(mesh, peer, message)
                if peer == mesh.self_id:  # its own weights it does not ask for
                    late.append(asyncio.create_task(deliver_late(peer)))
                return
            await pass_on(mesh, peer, message)
            if message.kind == STATE_MANIFEST and peer in held:
                late.append(asyncio.create_task(deliver_late(peer)))

        return send

    spy(monkeypatch, on_send)
    job = make_job()
    async with devices(3) as household:
        await household.holder_run(job, one_stage_each(3, 3)).run()
    await asyncio.gather(*late)
    assert len(late) == 3
    assert_same_weights(job, undisturbed(make_job(), 3))


async def test_a_commit_of_another_update_or_a_second_one_is_refused() -> None:
    async with devices(2) as household:
        refused = []

        def commit_early() -> None:
            hosted = engagement_of(household, "b")
            for commit in (Commit(0, 0), Commit(2, 2), Commit(1, 1), Commit(1, 1)):
                try:
                    hosted.commit(commit)
                except ProtocolError as error:
                    refused.append(str(error))

        await household.holder_run(
            make_job(), one_stage_each(2, 4), on_step(household, 2, commit_early)
        ).run()
        assert steps_of(household) == [1, 2, 3, 4]
    assert refused == [
        "a commit of update 0 instead of 1",
        "a commit of update 2 instead of 1",
        "a commit of update 1 while none is awaited",
    ]


async def test_nobody_waits_for_an_update_of_an_generation_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = asyncio.Event()

    def on_send(pass_on: Send) -> Send:
        async def send(mesh: MemoryMesh, peer: str, message: Message) -> None:
            if message.kind == COMMIT and message.fields["step"] == 1 and peer != mesh.self_id:
                lost.set()
            else:
                await pass_on(mesh, peer, message)

        return send

    spy(monkeypatch, on_send)
    async with devices(2) as household:
        running = asyncio.create_task(household.holder_run(make_job()).run())
        await lost.wait()
        hosted = engagement_of(household, "b")
        waiting = asyncio.create_task(hosted.applied())
        await asyncio.sleep(0)
        assert not waiting.done()
        await hosted.stop()
        with pytest.raises(PeerError, match="update 1 was not made here"):
            await waiting
        running.cancel()
        await asyncio.wait([running])


async def test_memory_that_the_first_update_lacks_is_planned_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing counts yet when it is found out."""
    attempts = iter([False, True])
    reserve = StageOptimizer.reserve

    def reserve_or_fail(optimizer: StageOptimizer) -> None:
        if next(attempts, False):
            raise MemoryError
        reserve(optimizer)

    monkeypatch.setattr(StageOptimizer, "reserve", reserve_or_fail)
    async with devices(2) as household:
        await household.holder_run(make_job(), one_stage_each(2, 3)).run()
    assert household.losses == undisturbed(make_job(), 3).losses
    assert household.plan.reason == "failure"


@pytest.mark.parametrize("coefficient", [None, (0.25, "float32"), (1.0, "bfloat16")])
def test_a_commit_travels_whole(coefficient: tuple[float, str] | None) -> None:
    commit = Commit(3, 2, coefficient)
    assert Commit.read(commit.fields()) == commit


@pytest.mark.parametrize(
    "changes", [{"coefficient": [0.5, "int64"]}, {"coefficient": "1"}, {"step": -1}]
)
def test_a_malformed_commit_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Commit.read({**Commit(3, 2, (0.5, "float32")).fields(), **changes})
