"""Frames: how a message becomes bytes on a link. Their prefix of 16 bytes, and a message's header.

A message is cut into frames of at most CHUNK_BYTES of payload, so that a message of a more urgent
lane can go between two. A lane sends one message at a time. All integers are big-endian.

     0        2         3      4       5          6              8              12           16
    | magic  | version | lane | flags | reserved | header bytes | payload bytes| number     |
    | "p2"   | 1       | 0..4 | 1 | 2 | 0        | u16 <= 4096  | u32 <= 256 Ki| u32        |
    | header (CBOR), only in a message's first frame, flag FIRST:                            |
    |   [kind, fields, [raw bytes of each part], [PartKind of each part] or []]              |
    | payload: the next bytes of the message's body; its last frame has flag LAST            |

`number` counts the lane's messages from 0, modulo 2^32, so a repeated or skipped message shows.
Lengths are checked before anything is read or allocated for them, and everything in the header is
hostile until checked. The body is

    codec of each part, one byte each | part 0 | part 1 | ...

with a RAW part as its bytes and other parts as blocks (`Block`); without parts there is no body.
The receiver's own buffers, not the wire, say how much there is to read of a part.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, TypeAlias

import lz4.block
import numpy as np

from p2ptrain.errors import InternalError, ProtocolError, VersionMismatch
from p2ptrain.net import cbor
from p2ptrain.net.message import HEADER_LIMIT_BYTES, Fields, PartKind, Priority

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


HEADER_DEPTH_LIMIT = 8
"""Containers within one another, the header's own list and the fields' dict included."""

PARTS_LIMIT = 1024

PART_LIMIT_BYTES = 2**40

_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_PART_KINDS = tuple(PartKind)

_MAX_PART_KIND = int(max(PartKind))


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header.

    Attributes:
        kind: 1 to 64 characters of A-Z a-z 0-9 _ . -
        fields: plain values with text keys; their meaning is the receiver's to check.
        part_bytes: raw size of each part as the sender claims, at most PART_LIMIT_BYTES.
        part_kinds: one a part, or empty for all OPAQUE.
        header_bytes: what it took on the link.
    """

    kind: str
    fields: Fields
    part_bytes: tuple[int, ...] = ()
    part_kinds: tuple[PartKind, ...] = ()
    header_bytes: int = field(default=0, compare=False)


def encode_header(
    kind: str,
    fields: Fields,
    part_bytes: Sequence[int] = (),
    part_kinds: Sequence[PartKind] = (),
) -> bytes:
    """Encode a header of at most HEADER_LIMIT_BYTES.

    Raises:
        InternalError: it is too long, or holds what `decode_header` would refuse.
    """
    items = [kind, fields, list(part_bytes), list(map(int, part_kinds))]
    if reason := _fault(items):
        raise InternalError(f"message {kind!r} cannot be sent: {reason}")
    data = cbor.dumps(items, HEADER_DEPTH_LIMIT)
    if len(data) > HEADER_LIMIT_BYTES:
        raise InternalError(f"header of message {kind!r} takes {len(data)} bytes: use a part")
    return data


def decode_header(data: bytes) -> Header:
    """Decode and check a header.

    Raises:
        ProtocolError: it is not what `encode_header` makes.
    """
    items = cbor.loads(data, HEADER_LIMIT_BYTES, HEADER_DEPTH_LIMIT)
    if not isinstance(items, list) or len(items) != 4:
        raise ProtocolError("message header is not a list of four")
    if reason := _fault(items):
        raise ProtocolError(f"message header is wrong: {reason}")
    kind, fields, part_bytes, part_kinds = items
    kinds = tuple([_PART_KINDS[n] for n in part_kinds])
    return Header(kind, fields, tuple(part_bytes), kinds, len(data))


def _fault(items: Sequence[Any]) -> str | None:
    """Why the four items make no header, or None."""
    kind, fields, part_bytes, part_kinds = items
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        return "kind is not a short dotted name"
    if not hasattr(fields, "keys"):
        return "fields are not a map"
    if not _integers(part_bytes, PART_LIMIT_BYTES) or len(part_bytes) > PARTS_LIMIT:
        return "part sizes are not a short list of sizes"
    if not _integers(part_kinds, _MAX_PART_KIND) or len(part_kinds) not in (0, len(part_bytes)):
        return "part kinds do not fit the parts"
    return None


def _integers(items: object, most: int) -> bool:
    """Whether `items` is a list of integers in [0, most]; True and False are not integers here."""
    if not isinstance(items, list):
        return False
    return not [n for n in items if type(n) is not int or not 0 <= n <= most]


BLOCK_BYTES = 128 * 1024

ELEMENT_BYTES = 4

STORED = 1 << 31

_LENGTH = struct.Struct("!I")

Filling: TypeAlias = Generator[memoryview, None, None]
"""Yields the next memory to fill completely, in wire order; ends when nothing is missing."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block ready for the wire: `prefix`, then `content`, which stand for `raw_bytes`.

    Each BLOCK_BYTES of a part (the last shorter) travel as

        +---------------------------------------+----------------+
        | u32: bit 31 = stored raw, length below | `length` bytes |
        +---------------------------------------+----------------+

    In a `Codec.SHUFFLED` part a block's bytes are first sorted by their place in elements of 4
    bytes (Blosc's shuffle filter): the exponents of floats, which LZ4 cannot shrink as they are,
    then lie side by side. Blocks that are no whole number of elements, and stored ones, stay as
    they are.

    The raw size of a block follows from the receiver's own buffer, never from the peer: it bounds
    the decoder's output, and a result of another length is refused. Raw LZ4 does not detect
    corruption; TLS does that on the wire.
    """

    prefix: bytes
    content: bytes | memoryview
    raw_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes this block takes on the wire."""
        return len(self.prefix) + len(self.content)


def encode_block(raw: memoryview, codec: Codec = Codec.LZ4) -> Block:
    """Compress at most BLOCK_BYTES; what does not shrink is stored as it is. Thread-safe."""
    source = _planes(raw) if _sorted(raw, codec) else raw
    packed: bytes = lz4.block.compress(source, store_size=False)
    if len(packed) < raw.nbytes:
        return Block(_LENGTH.pack(len(packed)), packed, raw.nbytes)
    return Block(_LENGTH.pack(raw.nbytes | STORED), raw, raw.nbytes)


def decode_block(packed: memoryview, raw: memoryview, codec: Codec = Codec.LZ4) -> None:
    """Decompress into all of `raw`.

    Raises:
        ProtocolError: `packed` is no LZ4 block of exactly `raw.nbytes`.
    """
    try:
        result: bytes = lz4.block.decompress(packed, uncompressed_size=raw.nbytes)
    except lz4.block.LZ4BlockError as error:
        raise ProtocolError(f"an LZ4 block is broken or too long: {error}") from error
    if len(result) != raw.nbytes:
        raise ProtocolError(f"an LZ4 block holds {len(result)} bytes instead of {raw.nbytes}")
    if _sorted(raw, codec):
        planes = np.frombuffer(result, np.uint8).reshape(ELEMENT_BYTES, -1)
        np.frombuffer(raw, np.uint8).reshape(-1, ELEMENT_BYTES)[:] = planes.T
    else:
        raw[:] = result


def fill_blocks(buffer: memoryview, codec: Codec) -> Filling:
    """Fill `buffer` from blocks.

    Raises:
        ProtocolError: a block's length cannot be right, or its content is broken.
    """
    length = memoryview(bytearray(_LENGTH.size))
    packed = memoryview(bytearray(min(BLOCK_BYTES, buffer.nbytes)))
    for start in range(0, buffer.nbytes, BLOCK_BYTES):
        raw = buffer[start : start + BLOCK_BYTES]
        yield length
        (word,) = _LENGTH.unpack(length)
        if word & STORED:
            _require(word ^ STORED == raw.nbytes)
            yield raw
        else:
            _require(0 < word < raw.nbytes)
            yield packed[:word]
            decode_block(packed[:word], raw, codec)


def _sorted(raw: memoryview, codec: Codec) -> bool:
    return codec is Codec.SHUFFLED and raw.nbytes % ELEMENT_BYTES == 0


def _planes(raw: memoryview) -> memoryview:
    elements = np.frombuffer(raw, np.uint8).reshape(-1, ELEMENT_BYTES)
    return np.ascontiguousarray(elements.T).reshape(-1).data


def _require(plausible: bool) -> None:
    if not plausible:
        raise ProtocolError("an LZ4 block claims an impossible length")
