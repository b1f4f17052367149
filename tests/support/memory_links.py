"""Links inside one process: the same framing, lanes and codecs, without sockets or TLS.

Bytes are copied between the two sides, as a network would;
each direction holds at most a set number of bytes before its writer is paused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from p2ptrain.errors import LinkClosed, PeerError
from p2ptrain.net.link.link import Link
from p2ptrain.net.link.stream import StreamUser

CAPACITY_BYTES = 256 * 1024


def connect(left: Link, right: Link) -> None:
    """Join two links that are not connected yet; both are open when this returns."""
    MemoryStream(left).join(MemoryStream(right))


class MemoryStream:
    """One end of an in-memory stream (`ByteStream`)."""

    def __init__(self, user: StreamUser) -> None:
        self.user = user
        self._loop = asyncio.get_running_loop()
        self.peer: MemoryStream | None = None
        self._arrived: deque[memoryview | None] = deque()  # None: the peer has closed
        self._arrived_bytes = 0
        self._reading_paused = False
        self._writer_paused = False  # whether the peer was asked to pause
        self._scheduled = False
        self._closing = False
        self._over = False

    def join(self, peer: MemoryStream) -> None:
        """Connect with `peer` and tell both users."""
        self.peer, peer.peer = peer, self
        self.user.opened(self)
        peer.user.opened(peer)

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """See `ByteStream.write`."""
        if self._closing or self._over or self.peer is None:
            return
        self.peer.arrive(memoryview(b"".join(buffers)))

    def limit_unsent(self, count: int) -> None:
        """See `ByteStream.limit_unsent`: here the capacity bounds it."""

    def hurry(self) -> None:
        """See `ByteStream.hurry`: nothing is held back here."""

    def arrival(self) -> None:
        """See `ByteStream.arrival`: there is nothing below."""

    def ends(self) -> None:
        """See `ByteStream.ends`: there is no network."""

    def pause_reading(self) -> None:
        """See `ByteStream.pause_reading`."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """See `ByteStream.resume_reading`."""
        self._reading_paused = False
        self._schedule()

    def close(self) -> None:
        """See `ByteStream.close`."""
        if not self._closing and not self._over:
            self._closing = True
            assert self.peer is not None
            self.peer.arrive(None)

    def abort(self) -> None:
        """See `ByteStream.abort`."""
        self.finish(None)
        if self.peer is not None:
            self.peer.finish(LinkClosed("the connection was cut"))

    def arrive(self, data: memoryview | None) -> None:
        """The other end has written this; None: it has closed."""
        if self._over:
            return
        self._arrived.append(data)
        self._arrived_bytes += 0 if data is None else len(data)
        if self._arrived_bytes > CAPACITY_BYTES and not self._writer_paused:
            self._writer_paused = True
            assert self.peer is not None
            self.peer.user.pause_writing()
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Give the user what arrived, until it has enough or nothing is left."""
        self._scheduled = False
        while self._arrived and not self._over and not self._reading_paused:
            data = self._arrived.popleft()
            if data is None:
                self._peer_closed()
            elif not self._closing:
                self._give(data)
        if self._writer_paused and not self._arrived and not self._over:
            self._writer_paused = False
            assert self.peer is not None
            self.peer.user.resume_writing()

    def _give(self, data: memoryview) -> None:
        buffer = self.user.get_buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        if count < len(data):
            self._arrived.appendleft(data[count:])
        self._arrived_bytes -= count
        try:
            self.user.received(count)
        except Exception:
            self.abort()  # as a transport does; the loop reports the bug
            raise

    def _peer_closed(self) -> None:
        self.finish(None)
        if self.peer is not None:
            self.peer.finish(None)

    def finish(self, error: PeerError | None) -> None:
        """The stream is over."""
        if not self._over:
            self._over = True
            self._arrived.clear()
            self._loop.call_soon(self.user.ended, error)
