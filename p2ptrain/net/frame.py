"""Frames: how one message becomes bytes on a link, and the 16-byte prefix of each.

A message is cut into frames of at most CHUNK_BYTES of payload, so that a more urgent lane's message
can go between two of them. A lane has one message in transit at a time, so the receiver holds at
most one unfinished message a lane. All integers are big-endian.

     0        2         3      4       5          6              8              12           16
    +--------+---------+------+-------+----------+--------------+--------------+------------+
    | magic  | version | lane | flags | reserved | header bytes | payload bytes| number     |
    | "p2"   | 1       | 0..4 | 1 | 2 | 0        | u16 <= 4096  | u32 <= 256 Ki| u32        |
    +--------+---------+------+-------+----------+--------------+--------------+------------+
    | header (CBOR, `header.py`): only in a message's first frame, flag FIRST               |
    +---------------------------------------------------------------------------------------+
    | payload: the next bytes of the message's body; its last frame has flag LAST           |
    +---------------------------------------------------------------------------------------+

`number` counts the lane's messages from 0, modulo 2^32, so a repeated or skipped message shows.
Lengths are checked before anything is read or allocated for them. The body is

    codec of each part, one byte each | part 0 | part 1 | ...

with a RAW part as its bytes and other parts as the blocks of `blocks.py`. A message without parts
has no body. No length of a part is on the wire beside the header's claim: the receiver's own
buffers say how much there is to read.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from p2ptrain.errors import ProtocolError, VersionMismatch
from p2ptrain.net.message import HEADER_LIMIT_BYTES, Priority

MAGIC = b"p2"
VERSION = 1
PREFIX_BYTES = 16
CHUNK_BYTES = 128 * 1024
"""Payload of a full frame as we send it. Larger: less CPU a byte. Smaller: a heartbeat waits less
(128 KiB take 10 ms at 100 Mbit/s)."""
CHUNK_LIMIT_BYTES = 2 * CHUNK_BYTES
"""Largest payload we accept, so that a later version may send larger chunks."""
NUMBER_MODULUS = 2**32

_PREFIX = struct.Struct("!2sBBBBHII")


class FrameFlag(IntFlag):
    """Where in its message a frame stands."""

    FIRST = 1
    LAST = 2


_FLAGS = tuple(FrameFlag(bits) for bits in range(4))
FIRST, LAST = int(FrameFlag.FIRST), int(FrameFlag.LAST)
_LANES = tuple(Priority)
# Tables and plain integers: an enum's own operations would be a tenth of what a frame costs.


class Codec(IntEnum):
    """How a part's bytes travel."""

    RAW = 0
    LZ4 = 1
    SHUFFLED = 2
    """LZ4 over the bytes of 4-byte elements sorted by significance: first all lowest, and so on."""


class WrongFrameVersion(ProtocolError, VersionMismatch):
    """The other side speaks another version of this framing."""


class Prefix(NamedTuple):
    """A frame's checked prefix.

    Attributes:
        lane: which of the link's lanes the frame belongs to.
        flags: FIRST and LAST, both for a message of one frame.
        header_bytes: 1 to HEADER_LIMIT_BYTES with FIRST, else 0.
        payload_bytes: at most CHUNK_LIMIT_BYTES; 0 only with FIRST or LAST.
        number: the message's number in its lane.
    """

    lane: Priority
    flags: FrameFlag
    header_bytes: int
    payload_bytes: int
    number: int

    @property
    def first(self) -> bool:
        """Whether a message begins here."""
        return self.header_bytes > 0

    @property
    def last(self) -> bool:
        """Whether a message ends here."""
        return self.flags >= LAST


def pack_prefix(lane: int, flags: int, header_bytes: int, payload_bytes: int, number: int) -> bytes:
    """The PREFIX_BYTES bytes of a `Prefix`, which need not be made for it."""
    return _PREFIX.pack(MAGIC, VERSION, lane, flags, 0, header_bytes, payload_bytes, number)


def decode_prefix(data: bytes | memoryview) -> Prefix:
    """Decode and check PREFIX_BYTES bytes.

    Raises:
        WrongFrameVersion: another version of this framing.
        ProtocolError: not a prefix of ours, or one that claims too much.
    """
    magic, version, lane, flags, reserved, header_bytes, payload_bytes, number = _PREFIX.unpack(
        data
    )
    if magic != MAGIC:
        raise ProtocolError("a frame does not begin with our magic bytes")
    if version != VERSION:
        raise WrongFrameVersion(
            f"the other device speaks frame version {version}, this one {VERSION}: "
            "install the same p2ptrain version on both"
        )
    if lane >= len(_LANES) or flags >= len(_FLAGS) or reserved:
        raise ProtocolError(f"a frame has lane {lane}, flags {flags}, reserved {reserved}")
    if header_bytes > HEADER_LIMIT_BYTES or flags & FIRST != (header_bytes > 0):
        raise ProtocolError(f"a frame has a header of {header_bytes} bytes")
    if payload_bytes > CHUNK_LIMIT_BYTES:
        raise ProtocolError(f"a frame has a payload of {payload_bytes} bytes")
    if not payload_bytes and not flags:
        raise ProtocolError("a frame carries nothing")
    return Prefix(_LANES[lane], _FLAGS[flags], header_bytes, payload_bytes, number)
