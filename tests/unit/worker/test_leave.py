"""Devices that tell the holder that they leave, and wait for its word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from unittest.mock import Mock

import pytest

from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.holder.planning import replan_watcher
from p2ptrain.holder.planning.evaluate_replan import ReplanRequest
from p2ptrain.holder.planning.plan_step import PlannedAttempt
from p2ptrain.holder.planning.planner_client import Planner
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply
from p2ptrain.holder.planning.replan_watcher import ReplanWatcher
from p2ptrain.mesh.interface import Mesh
from p2ptrain.messages.kinds import LEAVING
from p2ptrain.net.message import Message
from p2ptrain.recovery.choose_version import VersionChoice
from p2ptrain.recovery.cores.holder_core import HolderCore
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.version import Version
from tests.support.memory_household import MemoryHousehold
from tests.unit.coordinator.test_memory_model import request
from tests.unit.holder.start.test_journal import IN_FORCE
from tests.unit.messages.test_assignment import assignment, shared


def _elasticity(
    mesh: MemoryHousehold, want: Callable[[ReconfigureReason, str | None], None]
) -> ReplanWatcher:
    core = HolderCore(mesh["a"].self_id, Mock(), 1, 0)
    planner, profiler = Planner(mesh["a"], lambda device, why: None), ClusterProfiler(mesh["a"])
    asked = request(8), planner, profiler, core, lambda: 9, want
    return ReplanWatcher(mesh["a"], *asked, replans=True)


def _noting(
    wanted: asyncio.Queue[tuple[ReconfigureReason, str | None]],
) -> Callable[[ReconfigureReason, str | None], None]:
    return lambda reason, leaver: wanted.put_nowait((reason, leaver))


def _leave(mesh: MemoryHousehold) -> asyncio.Task[Message]:
    """As b."""
    leaving = Message(LEAVING, {"job": "j"})
    return asyncio.create_task(mesh["b"].call(mesh["a"].self_id, leaving, timeout_seconds=30.0))


async def _training_with_b(
    mesh: MemoryHousehold, wanted: asyncio.Queue[tuple[ReconfigureReason, str | None]] | None = None
) -> ReplanWatcher:
    device = mesh["b"].self_id
    elasticity = _elasticity(mesh, _noting(wanted or asyncio.Queue()))
    elasticity.start()
    place = replace(shared(3, 1), devices=(mesh["a"].self_id, device))
    choice = VersionChoice(Version(0, 0), ((device,),) * 3, 0, "")
    plan = IN_FORCE.plan
    elasticity.began(ReconfigureReply(assignment(place), plan, choice, PlannedAttempt(plan)))
    return elasticity


async def test_a_device_that_died_while_it_waited_may_leave_again() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        wanted: asyncio.Queue[tuple[ReconfigureReason, str | None]] = asyncio.Queue()
        elasticity, device = _elasticity(mesh, _noting(wanted)), mesh["b"].self_id
        elasticity.start()
        for _ in range(2):
            leaves = _leave(mesh)
            assert await wanted.get() == (ReconfigureReason.LEAVE, device)
            elasticity.gone(device)
            await leaves  # so that no process waits for a word to the one before it
            elasticity.appeared(device)
        await elasticity.close()


async def test_a_device_without_a_part_may_go_at_once() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        elasticity = _elasticity(mesh, lambda *_: elasticity.let_go(mesh["b"].self_id))
        elasticity.start()
        assert (await _leave(mesh)).fields == {}
        await elasticity.close()


async def test_a_look_that_fails_keeps_nobody() -> None:
    """No device says what it has, the holder neither."""
    async with MemoryHousehold(["a", "b"]) as mesh:
        wanted: asyncio.Queue[tuple[ReconfigureReason, str | None]] = asyncio.Queue()
        device = mesh["b"].self_id
        elasticity = await _training_with_b(mesh, wanted)
        leaves = _leave(mesh)
        assert await wanted.get() == (ReconfigureReason.LEAVE, device)
        await elasticity.close()
        await leaves


class Endless:
    """Looks that never end: why each begins, and "end" where one is given up."""

    said: asyncio.Queue[str]

    def __init__(self, _mesh: Mesh, asked: ReplanRequest, *_: object) -> None:
        self._reason = asked.reason

    async def answer(self) -> None:
        self.said.put_nowait(self._reason)
        try:
            await asyncio.Event().wait()
        finally:
            self.said.put_nowait("end")


async def _looking(
    mesh: MemoryHousehold, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Queue[str], ReplanWatcher]:
    """What is looked at, and a at the first of it, which never ends."""
    monkeypatch.setattr(replan_watcher, "ReplanEvaluation", Endless)
    Endless.said = asyncio.Queue()
    elasticity = await _training_with_b(mesh)
    elasticity.appeared(mesh["b"].self_id)
    elasticity._do(elasticity._core.compared(monotonic()))
    assert await Endless.said.get() == "drift"
    return Endless.said, elasticity


async def test_a_leave_ends_the_look_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        looks, elasticity = await _looking(mesh, monkeypatch)
        leaves = _leave(mesh)
        assert await looks.get() == "end"
        elasticity.keep(mesh["b"].self_id, "too little memory")
        assert (await leaves).fields["refused"] == "too little memory"
        await elasticity.close()


async def test_a_look_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would go on looking beside the training, for nobody."""
    monkeypatch.setitem(replan_watcher._LIMITS_SECONDS, ReconfigureReason.DRIFT, 0.01)
    async with MemoryHousehold(["a", "b"]) as mesh:
        looks, elasticity = await _looking(mesh, monkeypatch)
        assert await looks.get() == "end"
        await elasticity.close()


async def test_the_end_of_a_job_ends_the_look_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        looks, elasticity = await _looking(mesh, monkeypatch)
        await elasticity.close()
        assert await looks.get() == "end"
