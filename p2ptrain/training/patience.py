"""A call that may take as long as bytes take: given up where none arrive any more, not before.

At 1 Mbit/s 75 MB take ten minutes, and whoever gave up then would never get more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from time import monotonic

from p2ptrain.errors import Error
from p2ptrain.logs import get_logger
from p2ptrain.mesh.interface import Mesh
from p2ptrain.net.message import Message, PartsAllocator
from p2ptrain.training.protocol import ALIVE, integer

log = get_logger(__name__)

LOOK_SECONDS = 30.0
"""Between two questions how far they are; each is a small message."""
ASK_TIMEOUT_SECONDS = 20.0
"""On a link that is full the answer waits for the frames before it."""
LONGEST_SECONDS = 7 * 86400.0


async def call_while_bytes_arrive(
    mesh: Mesh,
    device: str,
    message: Message,
    *,
    receivers: Collection[str],
    patience_seconds: float,
    reply_parts: PartsAllocator | None = None,
) -> Message:
    """As `Mesh.call`.

    Args:
        receivers: devices that fetch what the answer waits for.
        patience_seconds: for the answer, or for more bytes at any of them.

    Raises:
        TimeoutError: neither came.
        PeerError: as `Mesh.call`.
    """
    calling = asyncio.create_task(
        mesh.call(device, message, timeout_seconds=LONGEST_SECONDS, reply_parts=reply_parts)
    )
    arrived, since = dict[str, int](), monotonic()
    try:
        while True:
            await asyncio.wait([calling], timeout=min(LOOK_SECONDS, patience_seconds))
            if calling.done():
                return calling.result()
            now = arrived | await _arrived(mesh, receivers)
            if now != arrived:
                arrived, since = now, monotonic()
            elif monotonic() - since >= patience_seconds:
                raise TimeoutError(f"nothing has arrived for {patience_seconds:g} s")
    finally:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


async def _arrived(mesh: Mesh, receivers: Collection[str]) -> dict[str, int]:
    """Bytes by device; nothing of one that does not answer."""
    devices = sorted(receivers)
    answers = await asyncio.gather(*(_arrived_at(mesh, device) for device in devices))
    return {d: count for d, count in zip(devices, answers, strict=True) if count is not None}


async def _arrived_at(mesh: Mesh, device: str) -> int | None:
    try:
        reply = await mesh.call(device, Message(ALIVE), timeout_seconds=ASK_TIMEOUT_SECONDS)
        if "fetched_bytes" not in reply.fields:
            return None
        return integer(reply.fields, "fetched_bytes", 0, 2**63)
    except (Error, TimeoutError) as error:
        log.info("not_said_what_arrived", device=device[:12], why=str(error))
        return None
