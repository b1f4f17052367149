"""A coordinator's looks: who is not kept waiting by what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from p2ptrain.coordinator import service as coordinator
from p2ptrain.coordinator.plan_question import ReplanReply, ReplanRequest
from p2ptrain.coordinator.service import CoordinatorService
from p2ptrain.errors import PeerError
from p2ptrain.messages.kinds import REPLAN, REPLAN_END
from p2ptrain.messages.reconfigure import PlanInForce
from p2ptrain.messages.requesters import Due
from p2ptrain.net.message import Message
from p2ptrain.net.parts import LARGE, limited
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.watch.profile_corrections import ProfileCorrections
from tests.support.memory_household import MemoryHousehold
from tests.unit.coordinator.test_memory_model import request
from tests.unit.holder.start.test_journal import PLAN
from tests.unit.messages.test_assignment import assignment, shared


class Looks:
    """Stands for `ReplanEvaluation`: a look at drift never ends by itself."""

    def __init__(self) -> None:
        self.drifts = asyncio.Semaphore(0)
        self.ends = asyncio.Semaphore(0)
        self.given_up: list[str] = []

    def make(self, mesh: object, asked: ReplanRequest, *_: object) -> Looks._Look:
        return self._Look(self, asked)

    class _Look:
        def __init__(self, looks: Looks, asked: ReplanRequest) -> None:
            self._looks = looks
            self._asked = asked

        async def answer(self) -> ReplanReply:
            if self._asked.reason is ReconfigureReason.LEAVE:
                return ReplanReply(None, None, "found at once", frozenset())
            self._looks.drifts.release()
            try:
                await asyncio.Event().wait()
            finally:
                self._looks.given_up.append(self._asked.holder)
                self._looks.ends.release()
            raise AssertionError


@asynccontextmanager
async def _household(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MemoryHousehold]:
    monkeypatch.setattr(coordinator, "ReplanEvaluation", looks.make)
    async with MemoryHousehold(["a", "b", "c"]) as mesh:
        service = CoordinatorService(mesh["a"], Due(mesh["a"]))
        for kind, route in service.routes.items():
            mesh["a"].route(kind, route.handler, route.parts)
        assert mesh["a"].coordinator is not None
        assert mesh["a"].coordinator.id == mesh["a"].self_id
        yield mesh


async def _consider(mesh: MemoryHousehold, name: str, reason: ReconfigureReason) -> ReplanReply:
    asked = ReplanRequest(
        planning=request(8),
        in_force=PlanInForce(assignment(shared(3, 1)), PLAN),
        reason=reason,
        holder=mesh[name].self_id,
        alive=frozenset(),
        without=frozenset(),
        corrections=ProfileCorrections(),
        work=1.0,
        lowered={},
        remaining_rounds=9,
        moved_seconds_ago=(),
    )
    reply = await mesh[name].call(
        mesh["a"].self_id,
        Message(REPLAN, {}, (memoryview(asked.to_bytes()),)),
        timeout_seconds=20.0,
        reply_parts=limited(LARGE.most_bytes),
    )
    return ReplanReply.from_bytes(reply.parts[0])


async def test_a_leave_does_not_wait_for_a_look_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks()
    async with _household(looks, monkeypatch) as mesh:
        drift = asyncio.create_task(_consider(mesh, "b", ReconfigureReason.DRIFT))
        other = asyncio.create_task(_consider(mesh, "c", ReconfigureReason.DRIFT))
        await looks.drifts.acquire()
        await looks.drifts.acquire()
        await mesh["b"].send(mesh["a"].self_id, Message(REPLAN_END, {"job": "j"}))
        assert (await _consider(mesh, "b", ReconfigureReason.LEAVE)).reason == "found at once"
        with pytest.raises(PeerError, match="given up"):
            await drift
        assert looks.given_up == [mesh["b"].self_id]  # another holder's goes on
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def test_a_look_ends_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks()
    async with _household(looks, monkeypatch) as mesh:
        holder = mesh["b"].self_id
        drift = asyncio.create_task(_consider(mesh, "b", ReconfigureReason.DRIFT))
        await looks.drifts.acquire()
        await mesh.kill("b")
        await looks.ends.acquire()
        assert looks.given_up == [holder]
        drift.cancel()
        await asyncio.gather(drift, return_exceptions=True)
