"""Requests waiting for their replies, matched by number.

A reply counts only when it comes from the device that was asked: the peer's id is the one its link
proved, never a field of the message.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from p2ptrain.errors import Error, LinkClosed
from p2ptrain.net.message import Message, PartsAllocator

PENDING_LIMIT = 4096
"""Most calls in flight; more would mean that a loop of ours has run away."""


@dataclass(frozen=True, slots=True)
class _Pending:
    peer_id: str
    reply_parts: PartsAllocator | None
    reply: asyncio.Future[Message]


class Calls:
    """The calls of one device that have no reply yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}

    def open(
        self, peer_id: str, reply_parts: PartsAllocator | None
    ) -> tuple[int, asyncio.Future[Message]]:
        """Number a call to `peer_id`; the future holds its reply or its error."""
        if len(self._pending) >= PENDING_LIMIT:
            raise LinkClosed(f"{PENDING_LIMIT} calls are waiting for replies already")
        number = next(self._numbers)
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(peer_id, reply_parts, reply)
        return number, reply

    def close(self, number: int) -> None:
        """Forget the call; a reply that still comes is dropped."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        if not pending.reply.cancel() and not pending.reply.cancelled():
            pending.reply.exception()  # looked at, so that asyncio does not report it as lost

    def is_open(self, peer_id: str, number: object) -> bool:
        """Whether a reply of that number is awaited from `peer_id`."""
        return self._find(peer_id, number) is not None

    def parts_allocator(self, peer_id: str, number: object) -> PartsAllocator | None:
        """Where the parts of that reply go; None where none may come."""
        pending = self._find(peer_id, number)
        return pending.reply_parts if pending else None

    def resolve(self, peer_id: str, number: object, outcome: Message | Error) -> bool:
        """Hand over the reply; False when nobody waits for it (any more)."""
        pending = self._find(peer_id, number)
        if pending is None or pending.reply.done():
            return False
        if isinstance(outcome, Error):
            pending.reply.set_exception(outcome)
        else:
            pending.reply.set_result(outcome)
        return True

    def fail(self, peer_id: str, error: Error) -> None:
        """The link to `peer_id` ended: nothing that waits for it will be answered."""
        for pending in self._pending.values():
            if pending.peer_id == peer_id and not pending.reply.done():
                # A fresh instance each: a raised exception carries its own traceback.
                pending.reply.set_exception(type(error)(*error.args))

    def _find(self, peer_id: str, number: object) -> _Pending | None:
        pending = self._pending.get(number) if isinstance(number, int) else None
        return pending if pending is not None and pending.peer_id == peer_id else None
