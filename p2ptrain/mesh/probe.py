"""How fast is a link now? Real bytes, counted when the receiver acknowledges them.

    latency = half of the shortest of a few round trips of an empty message
    rate    = acknowledged bytes / time from the first byte sent to the last acknowledgement

The bytes travel at `Priority.BULK`, so measuring never delays what somebody waits for, and a busy
link shows the rate that is left. What leaves a kernel buffer is not yet across: hence the counting
at the receiver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from p2ptrain.errors import ProtocolError
from p2ptrain.mesh.interface import LinkSpeed
from p2ptrain.net.message import Fields, Message, Priority

if TYPE_CHECKING:
    from p2ptrain.mesh.interface import Mesh

PING_KIND = "mesh.ping"
PROBE_KIND = "mesh.probe"
CHUNK_BYTES = 256 * 1024
"""Larger hides the cost of a message on fast links, smaller shortens the probe on slow ones."""
CHUNKS_IN_FLIGHT = 4
PINGS = 4
TIMEOUT_SECONDS = 10.0


class ProbeReceiver:
    """The receiving side: takes the bytes into one scratch buffer and acknowledges."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(CHUNK_BYTES))

    def install(self, mesh: Mesh) -> None:
        """Answer the probes of other devices."""
        mesh.route(PING_KIND, self._acknowledge)
        mesh.route(PROBE_KIND, self._acknowledge, self._open_parts)

    def _open_parts(self, _peer_id: str, _fields: Fields, sizes: Sequence[int]) -> list[memoryview]:
        if len(sizes) != 1 or not 0 < sizes[0] <= CHUNK_BYTES:
            raise ProtocolError(f"a link probe has one part of at most {CHUNK_BYTES} bytes")
        # Every probe may share the buffer: nobody ever reads it.
        return [self._scratch[: sizes[0]]]

    async def _acknowledge(self, _peer_id: str, _message: Message) -> Message:
        return Message("mesh.probed")


async def measure(mesh: Mesh, peer_id: str, duration_seconds: float) -> LinkSpeed:
    """Measure the direction from `mesh`'s device to `peer_id`.

    Raises:
        LinkClosed, TimeoutError: as `Mesh.call`.
    """
    latency_s = min([await _round_trip_seconds(mesh, peer_id) for _ in range(PINGS)]) / 2
    started = monotonic()
    lanes = [
        asyncio.create_task(_stream(mesh, peer_id, started + duration_seconds))
        for _ in range(CHUNKS_IN_FLIGHT)
    ]
    try:
        acknowledged_bytes = sum(await asyncio.gather(*lanes))
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return LinkSpeed(acknowledged_bytes / max(monotonic() - started, 1e-9), latency_s)


async def _round_trip_seconds(mesh: Mesh, peer_id: str) -> float:
    started = monotonic()
    await mesh.call(peer_id, Message(PING_KIND), timeout_seconds=TIMEOUT_SECONDS)
    return monotonic() - started


async def _stream(mesh: Mesh, peer_id: str, until: float) -> int:
    """Send chunk after chunk until the time is over; the bytes acknowledged."""
    chunk = Message(PROBE_KIND, parts=(memoryview(bytes(CHUNK_BYTES)),))
    acknowledged_bytes = 0
    while acknowledged_bytes == 0 or monotonic() < until:
        await mesh.call(peer_id, chunk, timeout_seconds=TIMEOUT_SECONDS, priority=Priority.BULK)
        acknowledged_bytes += CHUNK_BYTES
    return acknowledged_bytes
