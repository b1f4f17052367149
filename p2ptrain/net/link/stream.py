"""What lies between a link and whatever carries its bytes: two small interfaces.

`tls_stream.TlsStream` carries them over TLS and TCP, `MemoryStream` of tests inside one
process. Reading goes straight into the memory that the user of the stream offers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from p2ptrain.errors import PeerError

Address: TypeAlias = tuple[str, int]
"""(host name or address, port); an IPv6 address may carry a scope ("fe80::1%eth0")."""


@dataclass(frozen=True, slots=True)
class StreamArrival:
    """What has come over a stream so far, read or not.

    Attributes:
        received_bytes: in order.
        packets_ahead: that came before one that was sent sooner: nothing can read them before that
            one has been sent again, which takes seconds where the path is full.
    """

    received_bytes: int
    packets_ahead: int = 0


class ByteStream(Protocol):
    """A connected, ordered, reliable stream. Use from its event loop only."""

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send `buffers` in order; they are not needed any more when this returns.

        Never blocks; may call the user's `pause_writing` before it returns.
        """

    def limit_unsent(self, count: int) -> None:
        """Keep about `count` bytes at most where nothing can overtake them (a hint)."""

    def hurry(self) -> None:
        """Read what has come, however little."""

    def arrival(self) -> StreamArrival | None:
        """What has come below the stream; None where its user knows no less."""

    def ends(self) -> tuple[str, str] | None:
        """The IPs of this device and of the peer that it runs between; None without a network."""

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`; the sender is slowed down by TCP."""

    def resume_reading(self) -> None:
        """Read again."""

    def close(self) -> None:
        """Send what was written, then end the stream; the user's `ended` follows."""

    def abort(self) -> None:
        """End the stream now; the user's `ended` follows."""


class StreamUser(Protocol):
    """What a stream calls, from its event loop.

    Attributes:
        read_bytes: the most that is worth reading at once; the stream keeps memory for it.
    """

    read_bytes: int

    def opened(self, stream: ByteStream) -> None:
        """First call: the stream is connected, its peer known."""

    def get_buffer(self) -> memoryview:
        """Writable memory, never empty, for the next bytes."""

    def received(self, count: int) -> None:
        """The first `count` bytes of the last `get_buffer` were read."""

    def expected_bytes(self) -> int:
        """So many more bytes are sure to come before the user has anything to do.

        The stream may wait for them, to wake up less often.
        """

    def pause_writing(self) -> None:
        """Buffers are full: write no more for now."""

    def resume_writing(self) -> None:
        """Buffers have room again."""

    def ended(self, error: PeerError | None) -> None:
        """Last call; `error` is None where either side closed the stream in order."""
