"""Senders that wait for room in an `Outbox`, first come first served within a lane."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from p2ptrain.errors import PeerError
from p2ptrain.net.message import Priority
from p2ptrain.net.outbox import Outbox
from p2ptrain.net.outgoing import OutgoingMessage


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
        """Let in those for whom there is room now, before anybody new can take it."""
        waiting = self._waiting[lane]
        while waiting and self._outbox.has_room(waiting[0].message):
            waiter = waiting.popleft()
            if not waiter.admitted.done():  # a cancelled one leaves by itself
                self._outbox.put(waiter.message)
                waiter.admitted.set_result(None)

    def fail(self, error: PeerError) -> None:
        """Send everybody away with `error`."""
        for waiting in self._waiting:
            for waiter in waiting:
                if not waiter.admitted.done():
                    waiter.admitted.set_exception(error)
            waiting.clear()
