"""Where TLS records begin and end in a stream of cipher text (RFC 8446, section 5.1).

Nothing of a record can be read before all of it has come, so code that knows how much of it is
missing need not be woken for less. Its first five bytes say how long it is:

    type (1) | legacy version (2) | length (2, big-endian) | cipher text ...
"""

from __future__ import annotations

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
