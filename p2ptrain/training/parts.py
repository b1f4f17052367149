"""Where the parts of control messages go: blobs of bounded size. (Tensors: see `inlet`.)"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.errors import ProtocolError
from p2ptrain.net.message import Fields, PartsAllocator


def limited(limit_bytes: int) -> PartsAllocator:
    """An allocator for one blob of at most `limit_bytes`."""

    def allocate(peer: str, fields: Fields, sizes: Sequence[int]) -> list[memoryview]:
        if len(sizes) != 1 or sizes[0] > limit_bytes:
            raise ProtocolError(f"one part of at most {limit_bytes} bytes was expected")
        return [memoryview(bytearray(sizes[0]))]

    return allocate
