"""A device that fetches slowly is waited for as long as bytes arrive there."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import LinkClosed
from p2ptrain.mesh.memory import MemoryHousehold
from p2ptrain.net.message import Message
from p2ptrain.training import patience
from p2ptrain.training.patience import call_while_bytes_arrive
from p2ptrain.training.protocol import ALIVE, PREPARE

FAR = 50
"""Looks after which a test goes on."""


class Fetching:
    """A device whose bytes come one by one, one for each look; with the last one it is ready."""

    def __init__(self, household: MemoryHousehold, name: str, last: int) -> None:
        self.arrived, self._last = 0, last
        self.asked, self.is_far, self._ready = (asyncio.Event() for _ in range(3))
        household[name].route(PREPARE, self._prepare)
        household[name].route(ALIVE, self._alive)

    async def _prepare(self, peer: str, message: Message) -> Message:
        self.asked.set()
        await self._ready.wait()
        return Message(PREPARE, {"ready": True})

    async def _alive(self, peer: str, message: Message) -> Message:
        self.arrived = min(self.arrived + 1, self._last)
        if self.arrived == FAR:
            self.is_far.set()
        return Message(ALIVE, {"fetched_bytes": self.arrived})

    def end(self) -> None:
        """All is here."""
        self._ready.set()


async def _ask(household: MemoryHousehold, *receivers: str, patience_seconds: float) -> Message:
    return await call_while_bytes_arrive(
        household["a"],
        household["b"].self_id,
        Message(PREPARE),
        receivers=[household[name].self_id for name in receivers],
        patience_seconds=patience_seconds,
    )


async def test_it_may_take_as_long_as_bytes_arrive() -> None:
    """With no patience at all: each look finds one more."""
    async with MemoryHousehold(["a", "b"]) as household:
        fetching = Fetching(household, "b", last=1_000_000)
        asking = asyncio.create_task(_ask(household, "b", patience_seconds=0.0))
        await fetching.is_far.wait()
        assert not asking.done()
        fetching.end()
        assert (await asking).fields == {"ready": True}


async def test_where_no_more_comes_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.0)
    async with MemoryHousehold(["a", "b"]) as household:
        fetching = Fetching(household, "b", last=20)
        with pytest.raises(TimeoutError, match=r"nothing has arrived for 0\.001 s"):
            await _ask(household, "b", patience_seconds=0.001)
        assert fetching.arrived == 20


async def test_what_arrives_elsewhere_counts_where_the_answer_waits_for_it() -> None:
    async with MemoryHousehold(["a", "b", "c"]) as household:
        waiting, fetching = Fetching(household, "b", 0), Fetching(household, "c", 1_000_000)
        asking = asyncio.create_task(_ask(household, "b", "c", patience_seconds=0.0))
        await fetching.is_far.wait()
        waiting.end()
        assert (await asking).fields == {"ready": True}


async def test_a_device_that_dies_is_not_waited_for() -> None:
    async with MemoryHousehold(["a", "b"]) as household:
        fetching = Fetching(household, "b", last=1_000_000)
        asking = asyncio.create_task(_ask(household, "b", patience_seconds=60.0))
        await fetching.asked.wait()
        await household.kill("b")
        with pytest.raises(LinkClosed):
            await asking


async def test_a_device_that_does_not_say_what_arrives_gets_the_patience_alone() -> None:
    async with MemoryHousehold(["a", "b"]) as household:
        fetching = Fetching(household, "b", last=1_000_000)

        async def silent(peer: str, message: Message) -> Message:
            return Message(ALIVE, {"tasks": 1})

        household["b"].route(ALIVE, silent)
        with pytest.raises(TimeoutError):
            await _ask(household, "b", patience_seconds=0.0)
        assert fetching.asked.is_set()
