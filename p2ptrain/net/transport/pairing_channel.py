"""A small message channel to a device that is not paired yet.

    | length: u16 <= 4096 | content |   repeated

The other end is a stranger: messages are small, few may wait, and nothing is sent before the
pairing protocol above writes.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque

from p2ptrain.errors import InternalError, LinkClosed, PeerError, ProtocolError
from p2ptrain.net.link.stream import ByteStream

MESSAGE_LIMIT_BYTES = 4096

QUEUE_LIMIT = 2

_LENGTH = struct.Struct("!H")


class PairingChannel:
    """Messages of at most MESSAGE_LIMIT_BYTES each way, in order (a `StreamUser`).

    Attributes:
        address: the other side's host address, for logs and for counting attempts.
        peer_certificate_der: what the other side showed in the TLS handshake, or None.
    """

    read_bytes = MESSAGE_LIMIT_BYTES

    def __init__(self, address: str, peer_certificate_der: bytes | None = None) -> None:
        self.address = address
        self.peer_certificate_der = peer_certificate_der
        self._buffer = memoryview(bytearray(_LENGTH.size + MESSAGE_LIMIT_BYTES))
        self._filled = 0
        self._messages: deque[bytes] = deque()
        self._stream: ByteStream | None = None
        self._why_ended: tuple[type[PeerError], str] | None = None
        self._arrival: asyncio.Future[None] | None = None  # set while `receive` waits
        self._writable = asyncio.Event()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> asyncio.Future[None]:
        """Await it to know that the channel has ended."""
        return asyncio.shield(self._closed)

    def expire_after(self, seconds: float) -> None:
        """End the channel `seconds` from now; replaces an earlier limit."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._closed.done():
            return
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(seconds, self.abort, "the pairing took too long")

    async def send(self, content: bytes) -> None:
        """Send one message.

        Raises:
            LinkClosed: the channel has ended.
            InternalError: more than MESSAGE_LIMIT_BYTES.
        """
        if len(content) > MESSAGE_LIMIT_BYTES:
            raise InternalError(f"a pairing message of {len(content)} bytes is too long")
        await self._writable.wait()
        if self._why_ended is not None or self._stream is None:
            raise self._error()
        self._stream.write((_LENGTH.pack(len(content)) + content,))

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            LinkClosed: the channel has ended.
            ProtocolError: the other side broke the format.
        """
        while not self._messages:
            if self._why_ended is not None:
                raise self._error()
            if self._arrival is not None:
                raise InternalError("two tasks receive from one pairing channel")
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        message = self._messages.popleft()
        if len(self._messages) == QUEUE_LIMIT - 1 and self._stream is not None:
            self._stream.resume_reading()
        return message

    def close(self) -> None:
        """Send what was written, then end the channel."""
        self._fail(LinkClosed("this device closed the pairing channel"))
        if self._stream is not None:
            self._stream.close()

    def abort(self, reason: str) -> None:
        """End the channel now."""
        self._fail(LinkClosed(reason))
        if self._stream is not None:
            self._stream.abort()

    # For the stream below (StreamUser)

    def opened(self, stream: ByteStream) -> None:
        """The stream is connected."""
        self._stream = stream
        self._writable.set()

    def get_buffer(self) -> memoryview:
        """Memory for the next bytes."""
        return self._buffer[self._filled :]

    def expected_bytes(self) -> int:
        """Nothing is worth waiting for."""
        return 0

    def received(self, count: int) -> None:
        """Bytes came: cut them into messages."""
        self._filled += count
        begin = 0
        while self._why_ended is None and self._filled - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            if length > MESSAGE_LIMIT_BYTES:
                self._break(ProtocolError("a pairing message claims too many bytes"))
                return
            end = begin + _LENGTH.size + length
            if end > self._filled:
                break
            self._arrived(bytes(self._buffer[begin + _LENGTH.size : end]))
            begin = end
        rest = bytes(self._buffer[begin : self._filled])
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)

    def pause_writing(self) -> None:
        """The stream is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The stream has room."""
        self._writable.set()

    def ended(self, error: PeerError | None) -> None:
        """The stream is gone."""
        self._fail(error or LinkClosed("the other device closed the pairing channel"))
        self._stream = None
        if self._expiry is not None:
            self._expiry.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    def _arrived(self, message: bytes) -> None:
        if len(self._messages) >= 2 * QUEUE_LIMIT:
            self._break(ProtocolError("too many pairing messages at once"))
            return
        self._messages.append(message)
        if len(self._messages) == QUEUE_LIMIT and self._stream is not None:
            self._stream.pause_reading()
        self._wake()

    def _break(self, error: ProtocolError) -> None:
        self._fail(error)
        if self._stream is not None:
            self._stream.abort()

    def _error(self) -> PeerError:
        """A new one each time: one that was raised refers to its frames, and they to us."""
        kind, why = self._why_ended or (LinkClosed, "the pairing channel is closed")
        return kind(why)

    def _fail(self, error: PeerError) -> None:
        if self._why_ended is None:
            self._why_ended = type(error), str(error)
        self._writable.set()  # a waiting writer finds the error
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
