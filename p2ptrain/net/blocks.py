"""LZ4 blocks of a part: each raw BLOCK_BYTES (the last shorter) travels as

    +---------------------------------------+----------------+
    | u32: bit 31 = stored raw, length below | `length` bytes |
    +---------------------------------------+----------------+

The raw size of a block follows from the receiver's own buffer, never from the peer: it bounds the
decoder's output, and a result of another length is refused. Raw LZ4 does not detect corruption;
TLS does that on the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

import lz4.block

from p2ptrain.errors import ProtocolError

BLOCK_BYTES = 128 * 1024
STORED = 1 << 31

_LENGTH = struct.Struct("!I")

Filling: TypeAlias = Generator[memoryview, None, None]
"""Yields the next memory to fill completely, in wire order; ends when nothing is missing."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block ready for the wire: `prefix`, then `content`, which stand for `raw_bytes`."""

    prefix: bytes
    content: bytes | memoryview
    raw_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes this block takes on the wire."""
        return len(self.prefix) + len(self.content)


def encode_block(raw: memoryview) -> Block:
    """Compress at most BLOCK_BYTES; what does not shrink is stored as it is. Thread-safe."""
    packed: bytes = lz4.block.compress(raw, store_size=False)
    if len(packed) < raw.nbytes:
        return Block(_LENGTH.pack(len(packed)), packed, raw.nbytes)
    return Block(_LENGTH.pack(raw.nbytes | STORED), raw, raw.nbytes)


def decode_block(packed: memoryview, raw: memoryview) -> None:
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
    raw[:] = result


def fill_blocks(buffer: memoryview, decode: Callable[[memoryview, memoryview], None]) -> Filling:
    """Fill `buffer` from blocks. `decode` is `decode_block`, perhaps with a stopwatch around it.

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
            decode(packed[:word], raw)


def _require(plausible: bool) -> None:
    if not plausible:
        raise ProtocolError("an LZ4 block claims an impossible length")
