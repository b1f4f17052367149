"""Measures links, and other paths, with real bytes, counted when they are acknowledged.

    latency = half of the shortest of a few round trips of an empty message
    rate    = slope of the line through acknowledged bytes over time

    bytes         _-* ack
             _-*           the way of the first bytes, and of the last
         *-                acknowledgement, do not count for the rate
    ─────────────── time

The bytes travel at `Priority.BULK`, so a measurement never delays urgent messages, and a busy link
shows the rate that is left. The receiver counts, because what leaves a kernel buffer has not yet
arrived.

`all_ports_refuse` asks another question of a device: does any process still listen at its
address? A pulled cable or a frozen process refuses nothing; the kernel of a running machine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from p2ptrain.errors import LinkClosed, PeerError, ProtocolError
from p2ptrain.mesh.interface import LinkSpeed
from p2ptrain.net.frame import Header
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import Address
from p2ptrain.net.message import Fields, Message, Priority
from p2ptrain.net.transport.dial import MakeLink

if TYPE_CHECKING:
    from p2ptrain.mesh.interface import Mesh

PING_KIND = "mesh.ping"

PROBE_KIND = "mesh.probe"

CHUNK_BYTES = 256 * 1024
"""Larger hides the cost of a message on fast links, smaller shortens the probe on slow ones."""

CHUNKS_IN_FLIGHT = 4

MAX_BY_ALL = 1.15
"""A line's slope, by the rate of all from the first byte on. Larger believes bursts of
acknowledgements, smaller counts the way of the first bytes again."""

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
        # Every probe may share the buffer: it is never read.
        return [self._scratch[: sizes[0]]]

    async def _acknowledge(self, _peer_id: str, _message: Message) -> Message:
        return Message("mesh.probed")


async def measure_link(mesh: Mesh, peer_id: str, duration_seconds: float) -> LinkSpeed:
    """Measure the direction from `mesh`'s device to `peer_id`.

    Raises:
        LinkClosed, TimeoutError: as `Mesh.call`.
    """
    latency_s = min([await _round_trip_seconds(mesh, peer_id) for _ in range(PINGS)]) / 2
    started = monotonic()
    arrivals: list[float] = []
    lanes = [
        asyncio.create_task(_stream(mesh, peer_id, started + duration_seconds, arrivals))
        for _ in range(CHUNKS_IN_FLIGHT)
    ]
    try:
        await asyncio.gather(*lanes)
    finally:
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return LinkSpeed(CHUNK_BYTES * chunks_per_s(started, arrivals), latency_s)


def chunks_per_s(started: float, arrivals: Sequence[float]) -> float:
    """The slope of the line through so many chunks acknowledged over time, by least squares.

    Where a device stood still for a while all of them are acknowledged at once, so no more than
    MAX_BY_ALL times what they took from the first byte on.

    Args:
        started: when the first was sent.
        arrivals: of their acknowledgements, in order, at least one.
    """
    by_all = len(arrivals) / max(arrivals[-1] - started, 1e-9)
    if arrivals[-1] == arrivals[0]:
        return by_all
    return min(linear_regression(arrivals, range(len(arrivals))).slope, MAX_BY_ALL * by_all)


async def _round_trip_seconds(mesh: Mesh, peer_id: str) -> float:
    started = monotonic()
    await mesh.call(peer_id, Message(PING_KIND), timeout_seconds=TIMEOUT_SECONDS)
    return monotonic() - started


async def _stream(mesh: Mesh, peer_id: str, until: float, arrivals: list[float]) -> None:
    """Send chunk after chunk until the time is over; when they are acknowledged."""
    chunk = Message(PROBE_KIND, parts=(memoryview(bytes(CHUNK_BYTES)),))
    is_first = True
    while is_first or monotonic() < until:
        is_first = False
        await mesh.call(peer_id, chunk, timeout_seconds=TIMEOUT_SECONDS, priority=Priority.BULK)
        arrivals.append(monotonic())


CONNECT_SECONDS = 1.0


async def all_ports_refuse(addresses: Sequence[Address]) -> bool:
    """Whether each of `addresses` (at least one) refuses connections."""
    if not addresses:
        return False
    return all(await asyncio.gather(*(_refuses(address) for address in addresses)))


async def _refuses(address: Address) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(*address)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError included
        return False
    writer.transport.abort()
    return False


PATH_KIND = "mesh.path"

_ASK = "ask"

_PADDING = "padding"

_PADDING_CHARACTERS = 3500

_MESSAGE_BYTES = _PADDING_CHARACTERS + 50


Dial: TypeAlias = Callable[[Sequence[Address], str, MakeLink], Awaitable[Link]]
"""(addresses, expected id, make_link) -> a link whose peer has proved to be that device."""


@dataclass(frozen=True, slots=True)
class PathConfig:
    """When paths are measured, and when another one is taken.

    Attributes:
        first_seconds: after a link came up, or news of other addresses.
        again_seconds: after a look that changed nothing; doubles up to `rarest_seconds`.
        rarest_seconds: see `again_seconds`.
        measure_seconds: that one path is measured for, at most so long again for the last answer.
        limit_messages: of one measurement; what a hostile device may have taken in for nothing.
        better_factor: how many times as fast another path must be. A busy path looks slower than
            it is, and each change costs the round under way.
        most_paths: measured in one look.
    """

    first_seconds: float = 0.5
    again_seconds: float = 20.0
    rarest_seconds: float = 300.0
    measure_seconds: float = 0.3
    limit_messages: int = 2048
    better_factor: float = 2.0
    most_paths: int = 4


class PathProbe:
    """The measuring side of one connection; a `LinkReceiver`."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[PeerError | None] = asyncio.Queue(maxsize=2)

    def open_parts(self, link: Link, header: Header) -> Sequence[memoryview] | None:
        """Refuse. Raises ProtocolError."""
        raise ProtocolError("a path is answered without parts")

    def deliver(self, link: Link, message: Message) -> None:
        """What was sent has come."""
        if message.kind != PATH_KIND or self._answers.full():
            raise ProtocolError("a path that is measured is acknowledged once for each question")
        self._answers.put_nowait(None)

    def lost(self, link: Link, error: PeerError) -> None:
        """The connection has ended."""
        if not self._answers.full():
            self._answers.put_nowait(error)

    async def bytes_per_s(self, link: Link, config: PathConfig) -> float:
        """Send more and more until it takes `measure_seconds`; what the last burst made.

        Raises:
            LinkClosed: the connection ended, or nothing came back in time.
        """
        count, sent, rate = 8, 0, 0.0
        began = monotonic()
        while sent + count <= config.limit_messages:
            started = monotonic()
            await self._burst(link, count, config)
            seconds = max(monotonic() - started, 1e-6)
            sent, rate = sent + count, count * _MESSAGE_BYTES / seconds
            if monotonic() - began > config.measure_seconds / 2:
                break
            count *= 4
        return rate

    async def _burst(self, link: Link, count: int, config: PathConfig) -> None:
        padding = "x" * _PADDING_CHARACTERS
        try:
            async with asyncio.timeout(10 * config.measure_seconds):
                for number in range(count):
                    asks = {_ASK: True} if number == count - 1 else {}
                    await link.send(Message(PATH_KIND, {**asks, _PADDING: padding}))
                error = await self._answers.get()
        except TimeoutError:
            raise LinkClosed("this path is too slow") from None
        if error is not None:
            raise error


class PathAnswers:
    """The other side: how many messages of one connection have come for nothing."""

    def __init__(self, config: PathConfig) -> None:
        self._left = config.limit_messages

    def take(self, link: Link, message: Message) -> bool:
        """Whether `message` measures a path; it is answered where it asks. Raises ProtocolError."""
        if message.kind != PATH_KIND:
            return False
        self._left -= 1
        if self._left < 0:
            raise ProtocolError("a path is measured for ever")
        if message.fields.get(_ASK) is True:
            link.send_now(Message(PATH_KIND))
        return True
