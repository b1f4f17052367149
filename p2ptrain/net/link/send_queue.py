"""The send queue of a link: five lanes, each bounded, the most urgent first.

A lane sends one message at a time; between two frames any more urgent lane goes first. Each lane
has its own budget of queued bytes, so that bulk data can never keep a heartbeat out. Senders that
wait for room are served in order of arrival within a lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2ptrain.errors import PeerError
from p2ptrain.net.encoder import ChooseCodec, CompressionJob, Frame, OutgoingMessage
from p2ptrain.net.frame import CHUNK_BYTES, NUMBER_MODULUS
from p2ptrain.net.message import Priority


@dataclass(slots=True)
class _OutboxLane:
    budget_bytes: int
    queue: deque[OutgoingMessage] = field(default_factory=deque)
    queued_bytes: int = 0
    number: int = 0  # of the next message to start


class Outbox:
    """Bounded priority queue of messages, taken frame by frame.

    Attributes:
        messages: how many it holds.
        packing: how many of those in transit have blocks to be compressed.
    """

    def __init__(self, budgets_bytes: Mapping[Priority, int], choose: ChooseCodec) -> None:
        self.messages = 0
        self.packing = 0
        self._lanes = tuple(_OutboxLane(budgets_bytes[lane]) for lane in Priority)
        self._choose = choose

    def __bool__(self) -> bool:
        return self.messages > 0

    def queued_bytes(self, priority: Priority) -> int:
        """Bytes of the lane's messages that are not in a frame yet, before compression."""
        return self._lanes[priority].queued_bytes

    def has_room(self, message: OutgoingMessage) -> bool:
        """Whether the lane's budget admits `message`; an empty lane admits any one message."""
        lane = self._lanes[message.lane]
        fits = lane.queued_bytes + message.unsent_bytes <= lane.budget_bytes
        return fits or not lane.queue

    def put(self, message: OutgoingMessage) -> None:
        """Queue `message`, whether or not it has room."""
        lane = self._lanes[message.lane]
        lane.queue.append(message)
        lane.queued_bytes += message.unsent_bytes
        self.messages += 1

    def next_frame(
        self, limit_bytes: int = CHUNK_BYTES, lowest_limit_bytes: int = CHUNK_BYTES
    ) -> Frame | None:
        """A frame of the most urgent lane that has one ready; the lowest has a limit of its own."""
        for lane in self._lanes[:-1]:
            if lane.queue and (frame := self._lane_frame(lane, limit_bytes)):
                return frame
        lowest = self._lanes[-1]
        return self._lane_frame(lowest, lowest_limit_bytes) if lowest.queue else None

    def compression_jobs(self) -> list[tuple[OutgoingMessage, CompressionJob]]:
        """Blocks that the messages in transit want compressed now."""
        heads = [lane.queue[0] for lane in self._lanes if lane.queue]
        jobs = [(head, head.compression_job()) for head in heads if head.packs]
        return [(head, job) for head, job in jobs if job is not None]

    def clear(self) -> None:
        """Drop everything: the link is gone."""
        for lane in self._lanes:
            lane.queue.clear()
            lane.queued_bytes = 0
        self.messages = self.packing = 0

    def _lane_frame(self, lane: _OutboxLane, limit_bytes: int) -> Frame | None:
        message = lane.queue[0]
        if not message.started:
            message.start(lane.number, self._choose)
            lane.number = (lane.number + 1) % NUMBER_MODULUS
            self.packing += message.packs
        frame = message.next_frame(limit_bytes)
        if frame is not None:
            lane.queued_bytes -= frame.freed_bytes
            if frame.last:
                lane.queue.popleft()
                self.messages -= 1
                self.packing -= message.packs
                if message.message.on_sent is not None:
                    message.message.on_sent()
        return frame


@dataclass(frozen=True, slots=True)
class _Waiter:
    message: OutgoingMessage
    admitted: asyncio.Future[None]


class SendQueue:
    """The waiting room of an outbox; each caller waits with one message of its own."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._waiting: tuple[deque[_Waiter], ...] = tuple(deque() for _ in Priority)

    def put_now(self, message: OutgoingMessage) -> bool:
        """Put `message` into the outbox if it need not wait; whether it did."""
        if self._waiting[message.lane] or not self._outbox.has_room(message):
            return False
        self._outbox.put(message)
        return True

    async def put(self, message: OutgoingMessage) -> None:
        """Return once `message` is in the outbox; raises what `fail` was given instead."""
        if self.put_now(message):
            return
        waiting = self._waiting[message.lane]
        waiter = _Waiter(message, asyncio.get_running_loop().create_future())
        waiting.append(waiter)
        try:
            await waiter.admitted
        finally:
            if waiter in waiting:
                waiting.remove(waiter)

    def admit(self, lane: Priority) -> None:
        """Let in those for whom there is room now, before a new one can take it."""
        waiting = self._waiting[lane]
        while waiting and self._outbox.has_room(waiting[0].message):
            waiter = waiting.popleft()
            if not waiter.admitted.done():  # a cancelled one leaves by itself
                self._outbox.put(waiter.message)
                waiter.admitted.set_result(None)

    def fail(self, error: PeerError) -> None:
        """End every wait with `error`."""
        for waiting in self._waiting:
            for waiter in waiting:
                if not waiter.admitted.done():
                    waiter.admitted.set_exception(error)
            waiting.clear()
