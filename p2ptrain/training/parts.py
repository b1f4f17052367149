"""Where the parts of control messages go: blobs of bounded size. (Tensors: see `inlet`.)"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.errors import ProtocolError
from p2ptrain.net.message import Fields, Message, PartsAllocator


def limited(limit_bytes: int, count: int = 1) -> PartsAllocator:
    """An allocator for `count` blobs of at most `limit_bytes` together."""

    def allocate(peer: str, fields: Fields, sizes: Sequence[int]) -> list[memoryview]:
        if len(sizes) != count or sum(sizes) > limit_bytes:
            raise ProtocolError(f"{count} parts of at most {limit_bytes} bytes were expected")
        return [memoryview(bytearray(size)) for size in sizes]

    return allocate


def part_of(message: Message, index: int = 0) -> memoryview:
    """That part of a message, which may have come without: an allocator is asked for parts only.

    Raises:
        ProtocolError: it has none.
    """
    if index >= len(message.parts):
        raise ProtocolError(f"a message {message.kind!r} came without its part {index}")
    return message.parts[index]
