"""Queues of messages are bounded, by their number and by what they carry."""

from __future__ import annotations

import asyncio

from p2ptrain.mesh.links.handler_queues import USUAL_LIMITS, HandlerQueues, QueueLimits
from p2ptrain.net.message import Message

KEY = ("a" * 64, "kind")


class _Slow:
    """Handles a message each time it is asked to."""

    def __init__(self, limits: QueueLimits = USUAL_LIMITS) -> None:
        self.room: list[str] = []
        self.lanes = HandlerQueues(self._handle, self.room.append, limits)
        self._turns = asyncio.Semaphore(0)
        self._handled: asyncio.Queue[Message] = asyncio.Queue()

    async def _handle(self, _peer: str, message: Message) -> None:
        await self._turns.acquire()
        self._handled.put_nowait(message)

    async def handle(self, count: int) -> None:
        """Let that many more be handled."""
        for _ in range(count):
            self._turns.release()
            await self._handled.get()


async def test_a_lane_is_full_of_messages_and_goes_on_at_half_of_them() -> None:
    slow = _Slow()
    told = [slow.lanes.put(KEY, Message("kind")) for _ in range(USUAL_LIMITS.messages)]
    assert told == [True] * (USUAL_LIMITS.messages - 1) + [False]
    assert not slow.lanes.has_room(KEY[0])
    await slow.handle(USUAL_LIMITS.messages - USUAL_LIMITS.resume_messages - 1)
    assert slow.room == []
    await slow.handle(1)
    assert slow.room == [KEY[0]]
    assert slow.lanes.has_room(KEY[0])
    await slow.lanes.close()


async def test_a_lane_is_full_of_bytes_and_goes_on_below_them() -> None:
    slow = _Slow(QueueLimits(parts_bytes=100))
    big = Message("kind", {}, (memoryview(bytes(40)), memoryview(bytes(10))))
    assert [slow.lanes.put(KEY, big) for _ in range(4)] == [True, False, False, False]
    assert slow.lanes.has_room("b" * 64)
    await slow.handle(2)  # 100 bytes wait still
    assert slow.room == []
    await slow.handle(1)
    assert slow.room == [KEY[0]]
    await slow.handle(1)
    assert slow.room == [KEY[0]]
    await slow.lanes.close()


async def test_headers_count_in_all_lanes_of_a_device_together() -> None:
    """A hostile one uses every kind there is, none of them enough to fill its lane."""
    slow = _Slow(QueueLimits(headers_bytes=1000))
    keys = [(KEY[0], f"kind{number}") for number in range(5)]
    told = [slow.lanes.put(key, Message(key[1], header_bytes=200)) for key in keys]
    assert told == [True] * 4 + [False]
    assert not slow.lanes.has_room(KEY[0])
    assert slow.lanes.has_room("b" * 64)
    assert slow.lanes.put(("b" * 64, "kind"), Message("kind", header_bytes=200))
    more = [slow.lanes.put(KEY, Message("kind", header_bytes=200)) for _ in range(7)]
    assert not any(more)
    await slow.handle(6)  # what begins to be handled waits no more
    assert slow.room == []
    await slow.handle(6)
    assert slow.room == [KEY[0]]
    assert slow.lanes.has_room(KEY[0])
    await slow.lanes.close()
