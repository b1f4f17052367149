"""Compressed blocks of a part: each raw BLOCK_BYTES (the last shorter) travels as

    +---------------------------------------+----------------+
    | u32: bit 31 = stored raw, length below | `length` bytes |
    +---------------------------------------+----------------+

In a `Codec.SHUFFLED` part a block's bytes are first sorted by their place in elements of 4 bytes
(Blosc's shuffle filter): the exponents of floats, which LZ4 cannot shrink as they are, then lie
side by side. Blocks that are no whole number of elements, and stored ones, stay as they are.

The raw size of a block follows from the receiver's own buffer, never from the peer: it bounds the
decoder's output, and a result of another length is refused. Raw LZ4 does not detect corruption;
TLS does that on the wire.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

import lz4.block
import numpy as np

from p2ptrain.errors import ProtocolError
from p2ptrain.net.frame import Codec

BLOCK_BYTES = 128 * 1024

ELEMENT_BYTES = 4

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
