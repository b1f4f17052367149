"""Calls between devices: routes, long calls, work that the asker can cancel.

A call may take as long as the device that was asked shows that it works (`recovery.work_signs`): on
a slow link a fixed limit would end a transfer that makes progress. `CancellableWork` ends with the
asker's wish for it:

    asker                               worker
      |-- call ------------------------->|  `CancellableWork.do`
      |-- not wanted any more ---------->|  `give_up`; so does the asker's end
      |<-- that has been given up -------|
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from p2ptrain.errors import Error, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Handler, Mesh, display_name
from p2ptrain.mesh.waiting import is_gone, run_unless
from p2ptrain.messages.kinds import ALIVE
from p2ptrain.net.fields import Blob, part_of
from p2ptrain.net.message import Message, PartsAllocator
from p2ptrain.recovery.work_signs import USUAL, SignLimits, Signs, WorkSign


@dataclass(frozen=True, slots=True)
class MessageRoute:
    """See `Mesh.route`."""

    handler: Handler
    parts: PartsAllocator | None = None


log = get_logger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=Blob)

BESIDE_BYTES = 2048
"""A larger blob may take more than a millisecond to read: that is done beside the event loop."""

LONGEST_SECONDS = 7 * 86400.0


async def read_beside(read: Callable[[bytes], T], blob: memoryview) -> T:
    """What `read` makes of a blob; the event loop runs meanwhile where it is not a small one."""
    data = bytes(blob)
    if len(data) <= BESIDE_BYTES:
        return read(data)
    return await asyncio.to_thread(read, data)


async def read_part(form: type[B], message: Message, index: int = 0) -> B:
    """The form in a message's part. Raises ProtocolError."""
    return await read_beside(form.from_bytes, part_of(message, index))


class Hangs(PeerError):
    """A device is there and does not do what it was asked for.

    Attributes:
        device: its id.
        name: its display name.
        why: in words that follow its name.
    """

    def __init__(self, device: str, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.device, self.name = device, name
        self.why = why


async def call_while_it_works(
    mesh: Mesh,
    device: str,
    message: Message,
    *,
    timeout_seconds: float = LONGEST_SECONDS,
    reply_parts: PartsAllocator | None = None,
    limits: SignLimits = USUAL,
) -> Message:
    """As `Mesh.call`. Raises Hangs: the device shows nothing of it any more."""
    call = mesh.call(device, message, timeout_seconds=timeout_seconds, reply_parts=reply_parts)
    return await while_it_works(mesh, device, call, limits)


async def while_it_works(
    mesh: Mesh, device: str, work: Coroutine[Any, Any, T], limits: SignLimits = USUAL
) -> T:
    """What `work` returns, which waits for `device`. Raises Hangs as well."""
    if device == mesh.self_id:
        return await work
    working = asyncio.create_task(work)
    watching = asyncio.create_task(until_it_hangs(mesh, device, limits))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise watching.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def until_it_hangs(mesh: Mesh, device: str, limits: SignLimits = USUAL) -> Hangs:
    """Ask the device again and again how far it is, until its signs say that it hangs.

    Time in which this device's own event loop stands still is not the other one's silence.
    """
    signs = Signs(monotonic(), limits)
    asking: asyncio.Task[WorkSign | None] | None = None
    stood_seconds = 0.0
    try:
        while True:
            since = monotonic()
            await asyncio.sleep(limits.look_seconds)
            stood_seconds += max(0.0, monotonic() - since - limits.look_seconds)
            now = monotonic() - stood_seconds
            if asking is not None and asking.done():
                sign, asking = asking.result(), None
                if sign is not None:
                    signs.heard(sign, now)
            found = hanging(mesh, device, signs, now)
            if found is not None:
                return found
            if asking is None:
                asking = asyncio.create_task(_sign(mesh, device, limits.flowing_seconds))
    finally:
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


def hanging(mesh: Mesh, device: str, signs: Signs, now: float) -> Hangs | None:
    """The device hangs, by its signs and by what moves on the link to it; None: it does not."""
    link = mesh.link_statistics(device)
    if link is not None:
        signs.link_has(link.sent_bytes + link.received_bytes, now)
    why = signs.why_not(now)
    if why is None:
        return None
    log.warning("hangs", device=display_name(mesh, device), why=why)
    return Hangs(device, display_name(mesh, device), why)


async def _sign(mesh: Mesh, device: str, timeout_seconds: float) -> WorkSign | None:
    try:
        reply = await mesh.call(device, Message(ALIVE), timeout_seconds=timeout_seconds)
        return WorkSign.read(reply.fields)
    except (Error, TimeoutError) as error:
        log.info("no_sign", device=device[:12], why=str(error))
        return None


CANCEL_SECONDS = 1.0
"""A device that is stuck receives it later, or sees that the asker is gone."""


class CancellableWork:
    """Work of one kind, one piece for each key: the newest that was asked for.

    `what` names one unit of it in messages.
    """

    def __init__(self, mesh: Mesh, what: str) -> None:
        self._mesh = mesh
        self._what = what
        self._working: dict[Hashable, asyncio.Task[Any]] = {}

    async def do(self, key: Hashable, peer: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns or raises.

        Args:
            key: for `give_up`.
            peer: who wants it.

        Raises:
            PeerError: it was given up, or asked for once more, or `peer` is gone.
        """
        self.give_up(key)  # an asker that asks again waits no longer for the first answer

        async def wanted() -> T | None:  # given up before it begins, there is no work to end
            return await run_unless(self._mesh, lambda: is_gone(self._mesh, peer), work())

        working = self._working[key] = asyncio.create_task(wanted(), name=self._what)
        try:
            await asyncio.wait([working])
        finally:
            working.cancel()
            if self._working.get(key) is working:
                del self._working[key]
        result: T | None = None if working.cancelled() else working.result()
        if result is None:
            raise PeerError(f"that {self._what} has been given up")
        return result

    def has(self, key: Hashable) -> bool:
        """Whether there is such work under way."""
        return key in self._working

    def give_up(self, key: Hashable) -> None:
        """It is not wanted any more, if it is under way."""
        working = self._working.get(key)
        if working is not None:
            working.cancel()


async def cancel_remote_work(mesh: Mesh, device: str, message: Message) -> None:
    """Cancel work on another device; one that is stuck is not waited for."""
    try:
        async with asyncio.timeout(CANCEL_SECONDS):
            await mesh.send(device, message)
    except (PeerError, TimeoutError) as error:
        why = str(error) or "it took too long"
        log.info("not_informed_unwanted", device=device[:12], kind=message.kind, why=why)
