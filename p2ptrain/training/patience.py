"""Calls that may take as long as the device that was asked shows that it works: see `signs`.

At 1 Mbit/s 75 MB take ten minutes, and whoever gave up then would never get more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

from p2ptrain.errors import Error, PeerError
from p2ptrain.logs import get_logger
from p2ptrain.mesh.called import called
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message, PartsAllocator
from p2ptrain.training.protocol import ALIVE
from p2ptrain.training.recovery.signs import USUAL, SignLimits, Signs, WorkSign

log = get_logger(__name__)

T = TypeVar("T")

LONGEST_SECONDS = 7 * 86400.0


class Hangs(PeerError):
    """A device is there and does not do what it was asked for.

    Attributes:
        device: its id.
        name: as people call it.
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
    limits: SignLimits | None = None,
) -> Message:
    """As `Mesh.call`. Raises Hangs: the device shows nothing of it any more."""
    call = mesh.call(device, message, timeout_seconds=timeout_seconds, reply_parts=reply_parts)
    return await while_it_works(mesh, device, call, limits)


async def while_it_works(
    mesh: Mesh, device: str, work: Coroutine[Any, Any, T], limits: SignLimits | None = None
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


async def until_it_hangs(mesh: Mesh, device: str, limits: SignLimits | None = None) -> Hangs:
    """Ask the device again and again how far it is, until its signs say that it hangs."""
    limits = limits or USUAL
    signs = Signs(monotonic(), limits)
    asking: asyncio.Task[WorkSign | None] | None = None
    try:
        while True:
            await asyncio.sleep(limits.look_seconds)
            now = monotonic()
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
    log.warning("hangs", device=called(mesh, device), why=why)
    return Hangs(device, called(mesh, device), why)


async def _sign(mesh: Mesh, device: str, timeout_seconds: float) -> WorkSign | None:
    try:
        reply = await mesh.call(device, Message(ALIVE), timeout_seconds=timeout_seconds)
        return WorkSign.read(reply.fields)
    except (Error, TimeoutError) as error:
        log.info("no_sign", device=device[:12], why=str(error))
        return None
