"""TLS over an asyncio transport, as a `ByteStream`.

Why not asyncio's own TLS: with a `BufferedProtocol` it drops what is decrypted but not yet taken
when the peer closes, so a farewell can be lost; its lower write buffer cannot be bounded, so a
heartbeat waits longer; it takes one turn of the event loop for each buffer it fills; and it wakes
up for each packet. Here one `ssl.SSLObject` stands between two memory buffers and the transport:

    TCP -> _cipher -> ssl incoming -> the user's memory        user's memory -> ssl outgoing -> TCP

Ends: `close` sends close_notify and then only reads until the peer has closed too, so that no reset
can overtake what was sent. A stream that ends without close_notify was cut, and reports it.

Nothing of a TLS record (RFC 8446, section 5.1) can be read before all of it has come, so code that
knows how much is missing need not be woken for less. The first five bytes say how long it is:

    type (1) | legacy version (2) | length (2, big-endian) | cipher text ...
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeAlias, cast

from p2ptrain.errors import LinkClosed, NotPaired, PeerError, ProtocolError
from p2ptrain.net.link.stream import StreamArrival, StreamUser
from p2ptrain.net.transport import sockets

HANDSHAKE_BYTES = 16 * 1024
"""Most that a peer may send before the handshake is done; ours takes two thousand bytes."""

_HANDSHAKE_READ_BYTES = 4 * 1024

WRITE_HIGH_BYTES = 0
"""The transport pauses us as soon as the kernel is full, so at most one frame waits in between."""

WAKE_BYTES = 256 * 1024
"""Most that may be waited for before reading. Larger: less processor time; smaller: work begins
sooner on what has come."""

CLOSE_SECONDS = 2.0

ChooseUser: TypeAlias = Callable[[bytes | None], StreamUser]
"""(the peer's certificate in DER, or None) -> who uses the stream. Raises PeerError to refuse."""

_TRUST_REASONS = (
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "ACCESS_DENIED",
    "DECRYPT_ERROR",
    "VERIFY_FAILED",
)


class _TlsState(Enum):
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSING = "closing"  # we send nothing more, and drop whatever still arrives
    ENDED = "ended"


class TlsStream(asyncio.BufferedProtocol):
    """One TLS connection.

    Once it has ended it refers to nothing that refers to it: it may have been one of thousands of
    strangers', and it is not known when the garbage collector comes.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        choose_user: ChooseUser,
        *,
        server_side: bool,
        announce: Callable[[StreamUser], None] | None = None,
        received: bytes = b"",
    ) -> None:
        """`received`: what was read of the connection before this."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._cipher = memoryview(bytearray(_HANDSHAKE_READ_BYTES))
        self._received = received
        self._received_bytes = 0  # of the handshake
        self._borders = RecordBorders()
        self._woken_for = 1  # bytes; 0 where the platform cannot wait for several
        self._socket: socket.socket | None = None
        self._choose_user = choose_user
        self._announce = announce  # called with the user once it can write, before it reads
        self._user: StreamUser | None = None
        self._state = _TlsState.HANDSHAKE
        self._error: PeerError | None = None
        self._peer_closed = False
        self._reading_paused = False
        self._close_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Future[StreamUser] | None = self._loop.create_future()

    async def opened(self) -> StreamUser:
        """Who uses the stream, once the handshake is done. To be awaited once.

        Raises:
            PeerError: the handshake failed.
        """
        assert self._handshake is not None, "the handshake is awaited once"
        try:
            return await self._handshake
        finally:
            self._handshake = None  # its error refers to us, by the frame that raised it

    @property
    def user(self) -> StreamUser | None:
        """Whose stream it is; None before the handshake has succeeded, and after the end."""
        return self._user

    # What the user of the stream calls

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """See `ByteStream.write`. Ignored once the stream is closing."""
        if self._state is not _TlsState.OPEN:
            return
        write = self._tls.write
        for buffer in buffers:
            write(buffer)
        self._flush()

    def limit_unsent(self, count: int) -> None:
        """See `ByteStream.limit_unsent`."""
        if self._socket is not None and self._state is _TlsState.OPEN:
            sockets.limit_unsent(self._socket, count)

    def hurry(self) -> None:
        """See `ByteStream.hurry`."""
        self._wake_for(1)

    def arrival(self) -> StreamArrival | None:
        """See `ByteStream.arrival`."""
        if self._socket is None or self._state is not _TlsState.OPEN:
            return None
        return sockets.arrival(self._socket)

    def ends(self) -> tuple[str, str] | None:
        """See `ByteStream.ends`; link-local IPv6 addresses have their scope."""
        own, peer = self.get_extra_info("sockname"), self.get_extra_info("peername")
        if not isinstance(own, tuple) or not isinstance(peer, tuple):
            return None
        return sockets.host(own), sockets.host(peer)

    def pause_reading(self) -> None:
        """See `ByteStream.pause_reading`."""
        if self._transport is not None and self._state is _TlsState.OPEN:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See `ByteStream.resume_reading`."""
        if self._reading_paused:
            self._reading_paused = False
            self._loop.call_soon(self._resume)

    def close(self) -> None:
        """See `ByteStream.close`; the peer has CLOSE_SECONDS to close too."""
        if self._state in (_TlsState.HANDSHAKE, _TlsState.OPEN):
            self._end(None)

    def abort(self) -> None:
        """See `ByteStream.abort`."""
        self._state = _TlsState.CLOSING
        if self._transport is not None:
            self._transport.abort()

    def get_extra_info(self, name: str) -> object:
        """The transport's extra information, such as "peername"."""
        return None if self._transport is None else self._transport.get_extra_info(name)

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP is connected: begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without the class
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        if connection := transport.get_extra_info("socket"):
            self._socket = connection
            sockets.tune(connection)
        received, self._received = memoryview(self._received), b""
        if self._state is _TlsState.HANDSHAKE:
            self._take(received)
        else:
            self._transport.abort()  # given up before it was connected

    def get_buffer(self, sizehint: int) -> memoryview:
        """Memory for cipher text."""
        return self._cipher

    def buffer_updated(self, nbytes: int) -> None:
        """Cipher text came."""
        self._take(self._cipher[:nbytes])

    def _take(self, cipher: memoryview) -> None:
        self._borders.feed(cipher)
        if self._state is _TlsState.OPEN:
            self._incoming.write(cipher)
            self._read()
        elif self._state is _TlsState.HANDSHAKE:
            self._received_bytes += len(cipher)
            if self._received_bytes > HANDSHAKE_BYTES:
                self._end(ProtocolError("its TLS handshake is too long"))
                return
            self._incoming.write(cipher)
            self._shake_hands()

    def eof_received(self) -> None:
        """TCP ended; returning None closes the transport. Without close_notify it was a cut."""
        if self._state is _TlsState.OPEN:
            self._error = LinkClosed("the connection was cut")

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        if self._user is not None:
            self._user.pause_writing()

    def resume_writing(self) -> None:
        """The transport's buffer has drained."""
        if self._user is not None:
            self._user.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """TCP is gone, for whatever reason."""
        if self._close_timer is not None:
            self._close_timer.cancel()
        closing, self._state = self._state is _TlsState.CLOSING, _TlsState.ENDED
        error, self._error = self._error, None
        if error is None and exc is not None and not closing:
            error = LinkClosed(f"the connection was lost: {exc}")
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_exception(error or LinkClosed("the other device hung up"))
            self._handshake.exception()  # marked as seen: some callers do not await it
        user, self._user = self._user, None
        self._transport = self._socket = None
        if user is not None:
            user.ended(error)

    # TLS

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
            user = self._choose_user(self._tls.getpeercert(binary_form=True))
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._end(_explain(error))
        except PeerError as error:
            self._end(error)
        else:
            self._open(user)

    def _open(self, user: StreamUser) -> None:
        self._state = _TlsState.OPEN
        self._flush()
        self._user = user
        self._cipher = memoryview(bytearray(user.read_bytes))
        user.opened(self)
        if self._announce is not None:
            self._announce(user)
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_result(user)
        self._read()

    def _resume(self) -> None:
        if self._state is _TlsState.OPEN and not self._reading_paused:
            assert self._transport is not None
            self._transport.resume_reading()
            self._read()

    def _read(self) -> None:
        """Decrypt all there is into the user's memory."""
        user = self._user
        assert user is not None
        more = True
        while more and self._state is _TlsState.OPEN and not self._reading_paused:
            buffer = user.get_buffer()
            count, more = self._fill(buffer)
            if count:
                user.received(count)
        if self._state is _TlsState.OPEN:
            if self._error is not None or self._peer_closed:
                self._end(self._error)
            else:
                if self._outgoing.pending:
                    self._flush()  # a key update is answered while reading
                self._wait_for_more(user.expected_bytes())

    def _wait_for_more(self, expected_bytes: int) -> None:
        """Sleep until something can be read: a whole record, or the rest of what is expected.

        What is in hand of a record may be content, which is then not to come any more.
        """
        borders = self._borders
        if expected_bytes:
            expected_bytes += overhead_bytes(expected_bytes) - borders.in_hand_bytes
        count = min(max(expected_bytes, borders.missing_bytes, 1), WAKE_BYTES)
        if count < self._woken_for or count >= 2 * self._woken_for:  # else a little early is fine
            self._wake_for(count)

    def _wake_for(self, count: int) -> None:
        if count != self._woken_for and self._woken_for and self._socket is not None:
            self._woken_for = count if sockets.wake_for(self._socket, count) else 0

    def _fill(self, buffer: memoryview) -> tuple[int, bool]:
        """Decrypt records until `buffer` is full, one is shorter than it might be, or none is left.

        A short record ends what was written together, such as a frame's header: what follows may
        belong elsewhere. Returns how many bytes came, and whether there may be more.
        """
        count, size = 0, len(buffer)
        read = self._tls.read
        try:
            while count < size:
                got = cast(int, read(size - count, buffer[count:] if count else buffer))
                if not got:
                    self._peer_closed = True
                    return count, False
                count += got
                if got < RECORD_BYTES or self._incoming.pending <= self._borders.in_hand_bytes:
                    break
        except ssl.SSLWantReadError:
            return count, False
        except ssl.SSLError as error:
            self._error = _explain(error)
            return count, False
        if self._incoming.pending > self._borders.in_hand_bytes:
            return count, True  # another whole record
        return count, count == size and self._tls.pending() > 0

    def _end(self, error: PeerError | None) -> None:
        """Say goodbye, send nothing more, and wait for the peer's end so that no reset harms."""
        assert self._transport is not None
        self._state = _TlsState.CLOSING
        self._error = error
        with contextlib.suppress(ssl.SSLError):  # it waits for the peer's: we do not
            self._tls.unwrap()
        self._flush()
        self._close_timer = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
        if self._reading_paused:
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the peer may have cut the connection by now
                self._transport.write_eof()

    def _flush(self) -> None:
        cipher = self._outgoing.read()
        if cipher and self._transport is not None and not self._transport.is_closing():
            self._transport.write(cipher)


def _explain(error: ssl.SSLError) -> PeerError:
    """Our error for what OpenSSL says; an alert about a certificate means the trust is missing."""
    reason = error.reason or str(error)
    if any(sign in reason for sign in _TRUST_REASONS):
        return NotPaired(f"the devices are not paired ({reason}): pair them again")
    return LinkClosed(f"TLS failed: {reason}")


RECORD_BYTES = 16 * 1024
"""Most content of a record; only the last one of a write holds less."""

_HEAD_BYTES = 5

_OVERHEAD_BYTES = _HEAD_BYTES + 1 + 16
"""Of a record in TLS 1.3: head, type, and the tag that all its usual ciphers have."""


def overhead_bytes(content_bytes: int) -> int:
    """What records at least add to so much content."""
    return -(-content_bytes // RECORD_BYTES) * _OVERHEAD_BYTES


class RecordBorders:
    """Follows the borders; fed with everything that is received, in order.

    Attributes:
        in_hand_bytes: received of the record that is not complete yet.
        missing_bytes: what must still come of it, at the least; 0 between two records.
    """

    def __init__(self) -> None:
        self.in_hand_bytes = 0
        self.missing_bytes = 0
        self._head = b""  # begun, but not complete

    def feed(self, data: memoryview) -> None:
        """`data` came."""
        size = len(data)
        if size < self.missing_bytes:
            self.missing_bytes -= size
            self.in_hand_bytes += size
            if self._head:
                self._head += data
            return
        # Positions count from the beginning of `data`; `begin` may lie before it.
        begin, end = -self.in_hand_bytes, self.missing_bytes
        if self._head:
            head = self._head + data[: self.missing_bytes]
            end = begin + _HEAD_BYTES + int.from_bytes(head[3:], "big")
            self._head = b""
        elif not self.in_hand_bytes:
            end = 0
        while end + _HEAD_BYTES <= size:
            begin = end
            end += _HEAD_BYTES + (data[end + 3] << 8 | data[end + 4])
        self._stop(data, begin, end)

    def _stop(self, data: memoryview, begin: int, end: int) -> None:
        """`data` is over, its last record goes from `begin` to `end`, or the next begins there."""
        size = len(data)
        if end < size:  # a head that is cut off
            self._head = bytes(data[end:])
            begin, end = end, end + _HEAD_BYTES
        self.missing_bytes = end - size
        self.in_hand_bytes = size - begin if self.missing_bytes else 0
