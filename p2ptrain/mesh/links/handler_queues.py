"""Queues of messages, one for each key, each handled by one task in the order of arrival.

The sender bounds a queue: `put` reports when it is full, and the sender then stops (a link stops
reading its socket) until `on_room` reports room again. Three things are counted: messages, the
bytes of their parts (a sender may take answers slowly on purpose), and the headers of all messages
from one device, of any kind (a header of very small objects takes seventy times its bytes).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from p2ptrain.net.message import Message


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait before its sender has to stop.

    Attributes:
        messages: in one lane.
        resume_messages: in one lane, at which a stopped sender may go on.
        parts_bytes: of the parts in one lane.
        headers_bytes: of all waiting messages of one device. Raise: a hostile one takes more
            memory, up to 70 times that. Lower: honest devices with much to send stop. Reading
            resumes at half of it.
    """

    messages: int = 1024
    resume_messages: int = 512
    parts_bytes: int = 64 * 2**20
    headers_bytes: int = 2**20


USUAL_LIMITS = QueueLimits()

Handle: TypeAlias = Callable[[str, Message], Awaitable[None]]

LaneKey: TypeAlias = tuple[str, str]
"""(peer id, kind)."""


class _HandlerQueue:
    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.waiting: deque[Message] = deque()
        self.waiting_bytes = 0  # of their parts
        self.filled = asyncio.Event()  # set while something waits
        self.room = asyncio.Event()  # cleared from the limit down to where it resumes
        self.room.set()

    def append(self, message: Message) -> None:
        """The last one to wait."""
        self.waiting.append(message)
        self.waiting_bytes += message.parts_bytes
        self.filled.set()
        limits = self._limits
        if len(self.waiting) >= limits.messages or self.waiting_bytes >= limits.parts_bytes:
            self.room.clear()

    def popleft(self) -> Message:
        """The first one that waits."""
        message = self.waiting.popleft()
        self.waiting_bytes -= message.parts_bytes
        if not self.waiting:
            self.filled.clear()
        return message

    @property
    def may_resume(self) -> bool:
        """Whether a stopped sender may go on."""
        is_short = len(self.waiting) <= self._limits.resume_messages
        return is_short and self.waiting_bytes < self._limits.parts_bytes


class _HeaderBudget:
    """Bytes of the headers that wait, by the device that sent them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: Counter[str] = Counter()
        self._full: set[str] = set()

    def add(self, peer_id: str, message: Message) -> None:
        """One more waits."""
        if message.header_bytes:
            self._waiting[peer_id] += message.header_bytes
            if self._waiting[peer_id] >= self._limit_bytes:
                self._full.add(peer_id)

    def remove(self, peer_id: str, message: Message) -> None:
        """It does not wait any more."""
        if message.header_bytes:
            self._waiting[peer_id] -= message.header_bytes
            if not self._waiting[peer_id]:
                del self._waiting[peer_id]

    def have_room(self, peer_id: str) -> bool:
        """Whether that device may go on."""
        return peer_id not in self._full

    def may_resume(self, peer_id: str) -> bool:
        """Whether it had to stop, and may go on from now on."""
        if peer_id not in self._full or self._waiting[peer_id] > self._limit_bytes // 2:
            return False
        self._full.discard(peer_id)
        return True


class HandlerQueues:
    """All lanes of one device."""

    def __init__(
        self,
        handle: Handle,
        on_room: Callable[[str], None],
        limits: QueueLimits = USUAL_LIMITS,
    ) -> None:
        """`handle` must not raise; `on_room(peer id)` is called when a full lane has room."""
        self._handle = handle
        self._limits = limits
        self._on_room = on_room
        self._lanes: dict[LaneKey, _HandlerQueue] = {}
        self._headers = _HeaderBudget(limits.headers_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def put(self, key: LaneKey, message: Message) -> bool:
        """Queue `message`; False: this was the last one before `on_room`."""
        if self._closed:
            return True
        lane = self._lanes.get(key) or self._open(key)
        lane.append(message)
        self._headers.add(key[0], message)
        return lane.room.is_set() and self._headers.have_room(key[0])

    async def room(self, key: LaneKey) -> None:
        """Wait until the lane is not full."""
        if key in self._lanes:
            await self._lanes[key].room.wait()

    def has_room(self, peer_id: str) -> bool:
        """Whether none of the peer's lanes is full, nor all of them together."""
        lanes = (lane for key, lane in self._lanes.items() if key[0] == peer_id)
        return self._headers.have_room(peer_id) and all(lane.room.is_set() for lane in lanes)

    async def close(self) -> None:
        """Stop all lanes; what waits in them is dropped."""
        self._closed = True
        others = self._tasks - {asyncio.current_task()}  # a handler may be the one that closes
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for lane in self._lanes.values():
            lane.waiting.clear()
            lane.room.set()  # waiting senders resume

    def _open(self, key: LaneKey) -> _HandlerQueue:
        lane = self._lanes[key] = _HandlerQueue(self._limits)
        task = asyncio.create_task(self._run(key[0], lane), name=f"lane {key[1]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return lane

    async def _run(self, peer_id: str, lane: _HandlerQueue) -> None:
        while True:
            await lane.filled.wait()
            await self._handle(peer_id, self._next(peer_id, lane))
            resumes = self._headers.may_resume(peer_id)
            if lane.may_resume and not lane.room.is_set():
                lane.room.set()
                resumes = True
            if resumes:
                self._on_room(peer_id)

    def _next(self, peer_id: str, lane: _HandlerQueue) -> Message:
        message = lane.popleft()
        self._headers.remove(peer_id, message)
        return message
