"""Hands messages to handlers: in order for each (peer, kind), side by side otherwise.

    link ──> open_parts ──> deliver ──> queue of (peer, kind) ──> handler ──> reply ──> link
                                   ├──> a waiting call (replies overtake the queues)
                                   └──> what was routed by `route_now`, at once

A peer that sends faster than its messages are handled is slowed down by its own link: a full queue
makes `deliver` wait, and `put` reports it.

Requests wait for their replies, matched by number. A reply counts only when it comes from the
device that was asked: the peer's id is the one its link proved, never a field of the message.

A handler's error travels as fields of a reply: a name of p2ptrain's own error tree with a short
text, so that nothing a peer sends chooses what code runs here. An unknown name is a `PeerError`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from p2ptrain import errors
from p2ptrain.errors import Error, InternalError, LinkClosed, NotItsPart, PeerError, ProtocolError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.conduct import Offence
from p2ptrain.mesh.interface import Handler, Take
from p2ptrain.mesh.links.handler_queues import USUAL_LIMITS, HandlerQueues, QueueLimits
from p2ptrain.net.fields import printable
from p2ptrain.net.message import Fields, Message, PartsAllocator, Priority

log = get_logger(__name__)

REFUSED_KINDS_LIMIT = 64
"""Most different unrouted kinds counted by name: a peer chooses them."""

REPLY_KIND = "mesh.reply"

ERROR_KIND = "mesh.error"

_CALL = "_call"  # [number, priority] in a request's fields

_REPLY = "_reply"  # number in a reply's fields

_KIND = "_kind"  # a reply's own kind

_UNROUTED = ""  # one lane for all refusals: a peer must not be able to open lanes at will

Send: TypeAlias = Callable[[str, Message, Priority], Awaitable[None]]

Note: TypeAlias = Callable[[str, Offence, str, str], None]
"""(peer id, what it did, about whom, why)."""


@dataclass(frozen=True, slots=True)
class _KindRoute:
    """Who takes a kind; `take` where it needs no task of its own."""

    handler: Handler
    parts: PartsAllocator | None
    take: Take | None = None


@dataclass(frozen=True, slots=True)
class _ReplyTo:
    number: int
    priority: Priority


class Router:
    """Kinds, handlers and calls of one device.

    Attributes:
        refused: how often each unrouted kind was refused.
    """

    def __init__(
        self,
        name: str,
        send: Send,
        on_room: Callable[[str], None] = lambda _peer_id: None,
        note: Note = lambda _peer_id, _offence, _about, _why: None,
        limits: QueueLimits = USUAL_LIMITS,
    ) -> None:
        """Route for the device `name`.

        Args:
            name: shown in errors that peers get.
            send: how replies leave.
            on_room: (peer id) called when `put` had said that a lane is full and it no longer is.
            note: takes note of what was refused.
            limits: of what waits for handlers.
        """
        self.refused: Counter[str] = Counter()
        self._name = name
        self._send = send
        self._note = note
        self._routes: dict[str, _KindRoute] = {}
        self._calls = PendingCalls()
        self._lanes = HandlerQueues(self._handle, on_room, limits)
        self._closed = False

    def route(self, kind: str, handler: Handler, parts: PartsAllocator | None = None) -> None:
        """See `Mesh.route`."""
        self._routes[kind] = _KindRoute(handler, parts)

    def route_now(self, kind: str, take: Take, parts: PartsAllocator | None = None) -> None:
        """See `Mesh.route_now`."""

        async def handle(peer_id: str, message: Message) -> None:
            take(peer_id, message)

        self._routes[kind] = _KindRoute(handle, parts, take)

    def unroute(self, kind: str) -> None:
        """See `Mesh.unroute`."""
        self._routes.pop(kind, None)

    def open_parts(
        self, peer_id: str, kind: str, fields: Fields, sizes: Sequence[int]
    ) -> Sequence[memoryview] | None:
        """Where the parts of an arriving message go; None = it comes without them.

        Dropped are parts of a kind that no handler routes (any more) and of a reply that came too
        late: both happen between honest devices whenever a job ends.

        Raises:
            ProtocolError: no parts may come here, or not of these sizes.
        """
        if kind in (REPLY_KIND, ERROR_KIND):
            if not self._calls.is_open(peer_id, fields.get(_REPLY)):
                return None
            allocator = self._calls.parts_allocator(peer_id, fields.get(_REPLY))
        elif kind in self._routes:
            allocator = self._routes[kind].parts
        else:
            return None
        if allocator is None:
            raise ProtocolError(f"a message {kind!r} must not carry parts")
        return allocator(peer_id, _without_marks(fields), sizes)

    def put(self, peer_id: str, message: Message) -> bool:
        """Take in one message; False: a lane is full, bring no more before `on_room`.

        Raises:
            ProtocolError: the message is malformed; its link must close.
        """
        if message.kind in (REPLY_KIND, ERROR_KIND):
            self._take_reply(peer_id, message)
            return True
        route = self._routes.get(message.kind)
        if _CALL in message.fields:
            _reply_to(message.fields)  # refused here, where the link can still be closed
        elif route is not None and route.take is not None:
            self._take_now(peer_id, route.take, message)
            return True
        if route is None:
            self._count_refused(peer_id, message.kind)
        return self._lanes.put(self._lane_key(peer_id, message.kind), message)

    def _take_now(self, peer_id: str, take: Take, message: Message) -> None:
        if self._closed:
            return
        try:
            take(peer_id, _unmarked(message))
        except Error as error:
            self._note_refused(peer_id, message.kind, error)
            self._log_refusal(peer_id, message, error)
        except Exception:
            log.exception("handler_failed", kind=message.kind, peer=peer_id[:16])

    async def deliver(self, peer_id: str, message: Message) -> None:
        """Take in one message, once its lane has room. Raises as `put`."""
        await self._lanes.room(self._lane_key(peer_id, message.kind))
        self.put(peer_id, message)

    def has_room(self, peer_id: str) -> bool:
        """Whether none of the peer's lanes is full, nor all of them together."""
        return self._lanes.has_room(peer_id)

    async def call(
        self,
        peer_id: str,
        message: Message,
        *,
        timeout_seconds: float,
        priority: Priority = Priority.CONTROL,
        reply_parts: PartsAllocator | None = None,
    ) -> Message:
        """See `Mesh.call`."""
        if self._closed:
            raise LinkClosed("this device has left the household")
        number, reply = self._calls.open(peer_id, reply_parts)
        marked = {**message.fields, _CALL: [number, int(priority)]}
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._send(peer_id, replace(message, fields=marked), priority)
                return await reply
        finally:
            self._calls.close(number)

    def lost(self, peer_id: str, why: str) -> None:
        """The link to `peer_id` ended: its pending calls raise LinkClosed(why)."""
        self._calls.fail(peer_id, LinkClosed(why))

    async def close(self) -> None:
        """Stop all handlers and wait for them to end."""
        self._closed = True
        await self._lanes.close()

    def _lane_key(self, peer_id: str, kind: str) -> tuple[str, str]:
        return peer_id, kind if kind in self._routes else _UNROUTED

    async def _handle(self, peer_id: str, message: Message) -> None:
        route = self._routes.get(message.kind)
        try:
            if route is None:
                raise self._unrouted(message.kind)
            reply = await route.handler(peer_id, _unmarked(message))
            await self._answer(peer_id, message, reply or Message(""))
        except Error as error:
            await self._answer_error(peer_id, message, error)
        except Exception:
            log.exception("handler_failed", kind=message.kind, peer=peer_id[:16])
            bug = InternalError(f"{self._name} failed to handle {message.kind!r}; see its log")
            await self._answer_error(peer_id, message, bug)

    async def _answer(self, peer_id: str, request: Message, reply: Message) -> None:
        to = _reply_to(request.fields)
        if to is None:
            return
        fields = {**reply.fields, _REPLY: to.number, _KIND: reply.kind}
        answer = replace(reply, kind=REPLY_KIND, fields=fields)
        await self._send_answer(peer_id, answer, to.priority)

    async def _answer_error(self, peer_id: str, request: Message, error: Error) -> None:
        if request.kind in self._routes:
            self._note_refused(peer_id, request.kind, error)
        to = _reply_to(request.fields)
        if to is None:
            self._log_refusal(peer_id, request, error)
            return
        fields: dict[str, Any] = {**to_fields(error), _REPLY: to.number}
        await self._send_answer(peer_id, Message(ERROR_KIND, fields), to.priority)

    def _note_refused(self, peer_id: str, kind: str, error: Error) -> None:
        forged = isinstance(error, NotItsPart)
        offence = Offence.NOT_ITS_PART if forged else Offence.REFUSED
        self._note(peer_id, offence, "", f"{kind}: {error}")

    def _log_refusal(self, peer_id: str, message: Message, error: Error) -> None:
        # The user need not know what comes late for an ended job.
        say = log.warning if message.kind in self._routes else log.info
        say("message_refused", kind=message.kind, peer=peer_id[:16], why=str(error))

    async def _send_answer(self, peer_id: str, answer: Message, priority: Priority) -> None:
        try:
            await self._send(peer_id, answer, priority)
        except PeerError as error:
            # The caller learns it from its own end of the link.
            log.info("reply_not_sent", peer=peer_id[:16], why=str(error))

    def _take_reply(self, peer_id: str, message: Message) -> None:
        number = message.fields.get(_REPLY)
        outcome: Message | Error
        if message.kind == ERROR_KIND:
            outcome = from_fields(message.fields)
        else:
            kind = str(message.fields.get(_KIND, ""))
            outcome = replace(message, kind=kind, fields=_without_marks(message.fields))
        if not self._calls.resolve(peer_id, number, outcome):
            log.debug("late_reply", peer=peer_id[:16], number=number)

    def _unrouted(self, kind: str) -> PeerError:
        return PeerError(f"{self._name} does not handle {kind!r} now")

    def _count_refused(self, peer_id: str, kind: str) -> None:
        known = kind in self.refused or len(self.refused) < REFUSED_KINDS_LIMIT
        self.refused[kind if known else "(other kinds)"] += 1
        log.debug("kind_refused", kind=kind, peer=peer_id[:16])
        self._note(peer_id, Offence.UNKNOWN_KINDS, "", "")


def _unmarked(message: Message) -> Message:
    fields = _without_marks(message.fields)
    return message if fields is message.fields else replace(message, fields=fields)


def _without_marks(fields: Fields) -> Fields:
    if _CALL not in fields and _REPLY not in fields and _KIND not in fields:
        return fields
    return {key: value for key, value in fields.items() if key not in (_CALL, _REPLY, _KIND)}


def _reply_to(fields: Fields) -> _ReplyTo | None:
    """Whom to answer, or None for a plain message.

    Raises:
        ProtocolError: the mark is there but malformed.
    """
    mark = fields.get(_CALL)
    if mark is None:
        return None
    match mark:
        case [int(number), int(priority)] if number > 0 and 0 <= priority < len(Priority):
            return _ReplyTo(number, Priority(priority))
    raise ProtocolError("a request's call mark is malformed")


PENDING_LIMIT = 4096
"""Most calls in flight; more would mean that a loop of ours has run away."""


@dataclass(frozen=True, slots=True)
class _Pending:
    peer_id: str
    reply_parts: PartsAllocator | None
    reply: asyncio.Future[Message]


class PendingCalls:
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
        """Hand over the reply; False when no call waits for it (any more)."""
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


TEXT_LIMIT_BYTES = 1024


def _tree(root: type[errors.Error]) -> dict[str, type[errors.Error]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:  # others' are made otherwise, and mean nothing here
            found.update(_tree(child))
    return found


_CLASSES = _tree(errors.Error)


def to_fields(error: errors.Error) -> dict[str, str]:
    """The error's class name and text, cut to `TEXT_LIMIT_BYTES`."""
    text = str(error).encode()[:TEXT_LIMIT_BYTES].decode(errors="ignore")
    fields = {"error": type(error).__name__, "text": text}
    if isinstance(error, errors.DeviceLost):
        fields["device"] = error.name[:64]
    return fields


def from_fields(fields: Fields) -> errors.Error:
    """The error that `fields` describe, of a class from our own tree."""
    text = printable(str(fields.get("text", "")), TEXT_LIMIT_BYTES)
    cls = _CLASSES.get(str(fields.get("error")), errors.PeerError)
    if issubclass(cls, errors.DeviceLost):
        return cls(text, name=printable(str(fields.get("device", "")), 64))
    return cls(text)
