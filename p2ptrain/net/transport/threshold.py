"""What a connection must pass before any computation for the device that made it.

First its own first record, whole, which must be a TLS client's hello: silence and noise cost us a
socket and some bytes. Then a turn, as a handshake is the dearest thing a stranger can ask for.
"""

from __future__ import annotations

import asyncio
import socket

from p2ptrain.errors import LinkClosed, ProtocolError
from p2ptrain.net.transport.pace import Pace

HELLO_LIMIT_BYTES = 8 * 1024
"""Ours take some hundred bytes, with keys for times of quantum computers two thousand."""

MIN_PAUSE_SECONDS = 0.005
"""Between two looks at who waits."""

_HEAD_BYTES = 5

_HANDSHAKE, _CLIENT_HELLO = 0x16, 0x01


async def first_record(connection: socket.socket) -> bytes:
    """What has come of a connection once its first TLS record is there.

    Raises:
        LinkClosed: it ended before that.
        ProtocolError: it begins otherwise.
    """
    loop = asyncio.get_running_loop()
    received = b""
    while _missing_bytes(received) > 0:
        piece = await loop.sock_recv(connection, HELLO_LIMIT_BYTES - len(received))
        if not piece:
            raise LinkClosed("the other device hung up")
        received += piece
    return received


def _missing_bytes(received: bytes) -> int:
    """Of the first record; of its head, while that is not whole. Raises ProtocolError."""
    begins_well = received[:1] in (b"", bytes([_HANDSHAKE])) and received[1:2] in (b"", b"\x03")
    if not begins_well or received[5:6] not in (b"", bytes([_CLIENT_HELLO])):
        raise ProtocolError("it does not begin with a TLS hello")
    if len(received) < _HEAD_BYTES:
        return _HEAD_BYTES - len(received)
    size = _HEAD_BYTES + int.from_bytes(received[3:_HEAD_BYTES])
    if not _HEAD_BYTES < size <= HELLO_LIMIT_BYTES:
        raise ProtocolError("its TLS hello claims too many bytes")
    return size - len(received)


class PaceQueue:
    """Gives out the turns of a pace. Of those who wait the newest goes first: who has waited
    longest is the likeliest to be one of a flood."""

    def __init__(self, pace: Pace[str]) -> None:
        self._pace = pace
        self._waiting: list[tuple[str, bool, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, host: str, *, exempt: bool) -> None:
        """Wait for a turn of that address."""
        loop = asyncio.get_running_loop()
        if self._pace.take(host, loop.time(), exempt=exempt):
            return
        turn: asyncio.Future[None] = loop.create_future()
        entry = (host, exempt, turn)
        self._waiting.append(entry)
        self._look_within(self._pace.wait_seconds(host, loop.time(), exempt=exempt), loop)
        try:
            await turn
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def give_back(self, host: str, *, exempt: bool) -> None:
        """Who had a turn has proved to be no stranger."""
        self._pace.give_back(host, exempt=exempt)

    def _look_within(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Serve those who wait in so many seconds at the latest."""
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._serve, loop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        for entry in reversed(self._waiting.copy()):
            host, exempt, turn = entry
            if not turn.done() and self._pace.take(host, now, exempt=exempt):
                self._waiting.remove(entry)
                turn.set_result(None)
        waits = [self._pace.wait_seconds(host, now, exempt=ex) for host, ex, _ in self._waiting]
        if waits:
            self._look_within(max(min(waits), MIN_PAUSE_SECONDS), loop)
