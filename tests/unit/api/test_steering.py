"""A job is paused and stopped from any device, and only the run that was meant."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.api.steering import SteeringDesk, SteerRequest
from p2ptrain.errors import PeerError, UserError
from tests.support.memory_household import MemoryHousehold


class _Run:
    def __init__(self) -> None:
        self.done = False
        self.happened: list[tuple[str, str]] = []
        self.is_stopped = asyncio.Event()

    def pause(self, by: str = "") -> None:
        self.happened.append(("pause", by))

    def resume(self, by: str = "") -> None:
        self.happened.append(("resume", by))

    async def cancel(self, by: str = "") -> None:
        self.happened.append(("stop", by))
        self.is_stopped.set()


async def test_any_member_steers_the_run_that_it_means() -> None:
    async with MemoryHousehold(["a", "b"]) as mesh:
        desks = {name: SteeringDesk(mesh[name]) for name in ("a", "b")}
        holder, run = mesh["a"].self_id, _Run()
        with pytest.raises(PeerError, match="has ended on a"):
            await desks["b"].steer(holder, SteerRequest("r1", "pause"))
        desks["a"].begin("r1", run)
        await desks["b"].steer(holder, SteerRequest("r1", "pause"))
        await desks["a"].steer(holder, SteerRequest("r1", "resume"))
        with pytest.raises(PeerError, match="has ended"):
            await desks["b"].steer(holder, SteerRequest("another", "stop"))
        await desks["b"].steer(holder, SteerRequest("r1", "stop"))
        await run.is_stopped.wait()
        assert run.happened == [("pause", "b"), ("resume", "a"), ("stop", "b")]
        run.done = True
        with pytest.raises(UserError, match="has ended"):
            await desks["a"].steer(holder, SteerRequest("r1", "pause"))
        for desk in desks.values():
            await desk.close()
