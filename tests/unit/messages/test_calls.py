"""A device that was asked for something is waited for as long as it shows that it works on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from p2ptrain.errors import LinkClosed, PeerError
from p2ptrain.messages.calls import BESIDE_BYTES, Hangs, call_while_it_works, read_beside
from p2ptrain.messages.kinds import ALIVE, PREPARE
from p2ptrain.net.message import Message
from p2ptrain.recovery.work_signs import SignLimits, WorkSign
from tests.support.memory_household import MemoryHousehold

QUICK = SignLimits(
    look_seconds=0.001,
    silent_seconds=0.05,
    flowing_seconds=0.1,
    still_seconds=0.07,
    fruitless_seconds=0.1,
)


class Asked:
    """Device b, which does not answer before `end`, and says how far it is as `sign` has it."""

    def __init__(
        self, household: MemoryHousehold, sign: Callable[[int], Awaitable[WorkSign]]
    ) -> None:
        self.looks = 0
        self.was_asked, self._ready = asyncio.Event(), asyncio.Event()
        self._sign = sign
        self._mesh = household["a"]
        self._device = household["b"].self_id
        household["b"].route(PREPARE, self._prepare)
        household["b"].route(ALIVE, self._alive)

    async def call(self) -> Message:
        """Device a asks it."""
        return await call_while_it_works(self._mesh, self._device, Message(PREPARE), limits=QUICK)

    async def _prepare(self, peer: str, message: Message) -> Message:
        self.was_asked.set()
        await self._ready.wait()
        return Message(PREPARE, {"ready": True})

    async def _alive(self, peer: str, message: Message) -> Message:
        self.looks += 1
        if self.looks == 100:
            self._ready.set()
        return Message(ALIVE, (await self._sign(self.looks)).fields())


async def _fetches(looks: int) -> WorkSign:
    return WorkSign(1, looks)


async def _is_idle(looks: int) -> WorkSign:
    return WorkSign(1, 0)


async def _never(looks: int) -> WorkSign:
    await asyncio.Event().wait()
    raise AssertionError


async def _knows_nothing(looks: int) -> WorkSign:
    raise PeerError("b does not handle that")


async def _says_so(looks: int) -> WorkSign:
    return WorkSign(1, 0, works=True)


async def test_it_may_take_as_long_as_something_comes() -> None:
    async with MemoryHousehold(["a", "b"]) as household:
        asked = Asked(household, _fetches)
        assert (await asked.call()).fields == {"ready": True}
        assert asked.looks >= 100


async def test_what_stops_this_device_too_is_not_the_others_silence() -> None:
    async def stops_both(looks: int) -> WorkSign:
        if looks == 10:
            time.sleep(3 * QUICK.flowing_seconds)  # noqa: ASYNC251 - stops the event loop
        return WorkSign(1, looks)

    async with MemoryHousehold(["a", "b"]) as household:
        assert (await Asked(household, stops_both).call()).fields == {"ready": True}


@pytest.mark.parametrize(
    ("sign", "why"),
    [
        (_never, "b has not answered"),
        (_knows_nothing, "b has not answered"),
        (_is_idle, "b has done none of its work for"),
    ],
)
async def test_one_that_hangs_is_named(
    sign: Callable[[int], Awaitable[WorkSign]], why: str
) -> None:
    async with MemoryHousehold(["a", "b"]) as household:
        asked = Asked(household, sign)
        asked.looks = 1000  # it never ends
        with pytest.raises(Hangs, match=why) as caught:
            await asked.call()
        assert caught.value.device == household["b"].self_id


async def test_one_that_only_says_that_it_works_is_waited_for_until_a_limit() -> None:
    async with MemoryHousehold(["a", "b"]) as household:
        asked = Asked(household, _says_so)
        asked.looks = 1000
        with pytest.raises(Hangs, match="says that it works, but has finished nothing"):
            await asked.call()


async def test_a_device_that_dies_is_not_waited_for() -> None:
    async with MemoryHousehold(["a", "b"]) as household:
        asked = Asked(household, _fetches)
        calling = asyncio.create_task(asked.call())
        await asked.was_asked.wait()
        await household.kill("b")
        with pytest.raises(LinkClosed):
            await calling


async def test_the_event_loop_goes_on_while_a_large_blob_is_read() -> None:
    seen, ticks = [], 0
    ticked = asyncio.Event()

    def read(data: bytes) -> int:
        seen.append(asyncio.run_coroutine_threadsafe(ticked.wait(), loop).result(5))
        return len(data)

    async def tick() -> None:
        nonlocal ticks
        ticks += 1
        ticked.set()

    loop = asyncio.get_running_loop()
    reading = asyncio.create_task(read_beside(read, memoryview(bytes(BESIDE_BYTES + 1))))
    await tick()
    assert await reading == BESIDE_BYTES + 1
    assert seen == [True]
    assert await read_beside(len, memoryview(b"abc")) == 3
