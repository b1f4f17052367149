"""Checksums of tensors' bytes, 128 KiB at a time: they show damage by memory or a disk.

XXH3, 64 bits: it misses one change in 2^64 and costs a sixth of crc32, which matters because every
byte of a snapshot is summed at both ends. TLS protects bytes between devices; this is for the time
in memory and for our own mistakes in joining ranges, not against an attacker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor
from xxhash import xxh3_64_intdigest

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.errors import PeerError, ProtocolError
from p2ptrain.model.wire.tensor_codec import pack

CHUNK_BYTES = 128 << 10
"""Smaller: more of a manifest. Larger: more is read again after an error."""

AT_ONCE_BYTES = 2 << 20
"""Most whose checksums are taken on the event loop: in 0.1 ms, no more than a thread would cost."""

Digest: TypeAlias = tuple[int, ...]
"""Of one tensor as it travels: XXH3 of each CHUNK_BYTES of its bytes, the last one of less."""


class ChecksumMismatch(PeerError):
    """A tensor's bytes are not those that its checksum was taken of."""


def digest_of(part: memoryview) -> Digest:
    """Of a tensor's bytes, or of some of them that begin at a chunk's border."""
    return tuple(
        xxh3_64_intdigest(part[begin : begin + CHUNK_BYTES])
        for begin in range(0, part.nbytes, CHUNK_BYTES)
    )


async def digests_beside(parts: Sequence[memoryview]) -> list[Digest]:
    """Of some tensors' bytes, each from a chunk's border on; in a thread where it takes long."""
    if sum(part.nbytes for part in parts) <= AT_ONCE_BYTES:
        return [digest_of(part) for part in parts]
    return await run_in_background(lambda: [digest_of(part) for part in parts])


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """By name; about 0.05 ns a byte."""
    return {name: digest_of(pack(tensor).part) for name, tensor in tensors.items()}


def find_damaged(tensors: Mapping[str, Tensor], digests: Mapping[str, Digest]) -> list[str]:
    """Names of those of `tensors` that do not fit their digest; one without is taken as it is."""
    return [
        name
        for name, tensor in tensors.items()
        if name in digests and digest_of(pack(tensor).part) != digests[name]
    ]


def chunks(begin: int, end: int) -> slice:
    """Which chunks the bytes [begin, end) of a tensor are; `begin` is a chunk's border."""
    return slice(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))


def chunk_count(part_bytes: int) -> int:
    """Length of the digest of so many bytes."""
    return -(-part_bytes // CHUNK_BYTES)


def read_digest(value: object, part_bytes: int) -> Digest:
    """Check and read what a peer says is the digest of so many bytes. Raises ProtocolError."""
    if not isinstance(value, list) or len(value) != chunk_count(part_bytes):
        raise ProtocolError(f"the digest of {part_bytes} bytes has one checksum a chunk")
    return tuple(_checksum(one) for one in value)


def split_digests(value: object, sizes: Sequence[int]) -> list[Digest]:
    """A reply's checksums, one list for all of its parts, by part. Raises ProtocolError."""
    counts = [chunk_count(size) for size in sizes]
    if not isinstance(value, list) or len(value) != sum(counts):
        raise ProtocolError("a range of a state has one checksum a chunk")
    sums, found = [_checksum(one) for one in value], []
    for count in counts:
        found.append(tuple(sums[:count]))
        del sums[:count]
    return found


def _checksum(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ProtocolError("a checksum is a whole number below 2^64")
    return value
