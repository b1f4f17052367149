"""The sending half of the framing, without IO: one message, frame by frame."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from p2ptrain.errors import InternalError
from p2ptrain.net.frame import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    FIRST,
    LAST,
    PREFIX_BYTES,
    Block,
    Codec,
    encode_header,
    pack_prefix,
)
from p2ptrain.net.message import Message, PartKind, Priority

Buffers: TypeAlias = tuple[bytes | memoryview, ...]

ChooseCodec: TypeAlias = Callable[[PartKind, memoryview], Codec]

JOB_BLOCKS = 4
"""Blocks compressed at a time, while the ones before them are being sent."""

JOIN_BYTES = 16 * 1024
"""Shorter frames are joined into one write: one TLS record instead of several."""


class Frame(NamedTuple):
    """What to write, in order.

    Attributes:
        lane: whose message it belongs to.
        buffers: prefix, header and payload.
        wire_bytes: their total.
        freed_bytes: how much of the message's `unsent_bytes` this frame takes away.
        last: whether the message ends with it.
    """

    lane: Priority
    buffers: Buffers
    wire_bytes: int
    freed_bytes: int
    last: bool


@dataclass(frozen=True, slots=True)
class CompressionJob:
    """Blocks of one part, to be compressed in this order."""

    kind: PartKind
    codec: Codec
    blocks: tuple[memoryview, ...]


class OutgoingMessage:
    """A message on its way out.

    Call `start` once, then `next_frame` until `finished`. `next_frame` gives None while blocks
    must be compressed first: take them from `compression_job`, give results to `compressed`.

    Attributes:
        started: whether `start` was called.
        packs: whether blocks must be compressed; known once it has started.

    Raises:
        InternalError: the message cannot be encoded; raised when it is made, to its author.
    """

    __slots__ = (
        "_codecs",
        "_compressing",
        "_header",
        "_kinds",
        "_number",
        "_opened",
        "_ready",
        "_to_compress",
        "lane",
        "message",
        "packs",
        "started",
        "unsent_bytes",
    )

    def __init__(self, message: Message, lane: Priority) -> None:
        self.message = message
        self.lane = lane
        self.started = False
        self.packs = False
        sizes = _part_sizes(message)
        self._header = encode_header(message.kind, message.fields, sizes, message.part_kinds)
        self.unsent_bytes = len(self._header) + sum(sizes)
        self._number = 0
        self._kinds = message.part_kinds or (PartKind.OPAQUE,) * len(sizes)
        self._codecs: tuple[Codec, ...] = ()
        self._opened = 0  # parts opened so far
        self._ready: deque[tuple[memoryview, int]] = deque()  # (bytes, what they count for)
        self._to_compress: deque[memoryview] = deque()  # blocks of the open part
        self._compressing = 0  # blocks handed out as a job

    @property
    def finished(self) -> bool:
        """Whether the last frame has been taken."""
        return self.started and not self._header and self._exhausted

    @property
    def _exhausted(self) -> bool:
        waiting = self._ready or self._to_compress or self._compressing
        return not waiting and self._opened == len(self.message.parts)

    def start(self, number: int, choose: ChooseCodec) -> None:
        """Fix the message's number in its lane and, by the latest measurements, its codecs."""
        self.started = True
        self._number = number
        if self.message.parts:
            self._codecs = tuple(map(choose, self._kinds, self.message.parts))
            codecs = bytes(self._codecs)
            self.packs = any(codecs)
            self._ready.append((memoryview(codecs), 0))

    def next_frame(self, limit_bytes: int = CHUNK_BYTES) -> Frame | None:
        """The next frame with at most `limit_bytes` of payload, or None while none is ready."""
        payload, payload_bytes, freed = self._take(limit_bytes)
        header, self._header = self._header, b""
        if not header and not payload:
            return None
        last = self._exhausted
        flags = (FIRST if header else 0) | (LAST if last else 0)
        header_bytes = len(header)
        prefix = pack_prefix(self.lane, flags, header_bytes, payload_bytes, self._number)
        freed += header_bytes
        self.unsent_bytes -= freed
        wire_bytes = PREFIX_BYTES + header_bytes + payload_bytes
        buffers = _joined(prefix, header, payload, wire_bytes)
        return Frame(self.lane, buffers, wire_bytes, freed, last)

    def compression_job(self) -> CompressionJob | None:
        """What to compress now; None where nothing waits or a job is still out."""
        if self._compressing or len(self._ready) > JOB_BLOCKS:
            return None
        if not self._ready:
            self._open_part()
        self._compressing = min(JOB_BLOCKS, len(self._to_compress))
        if not self._compressing:
            return None
        blocks = tuple(self._to_compress.popleft() for _ in range(self._compressing))
        part = self._opened - 1
        return CompressionJob(self._kinds[part], self._codecs[part], blocks)

    def compressed(self, blocks: Iterable[Block]) -> None:
        """The results of the last `compression_job`, in its order."""
        self._compressing = 0
        for block in blocks:
            self._ready.append((memoryview(block.prefix), 0))
            self._ready.append((memoryview(block.content), block.raw_bytes))

    def _take(self, limit_bytes: int) -> tuple[list[memoryview], int, int]:
        """Ready bytes, at most so many; their number; how much of `unsent_bytes` they stand for."""
        taken: list[memoryview] = []
        room, freed = limit_bytes, 0
        while room and (self._ready or self._open_part()):
            piece, counts = self._ready.popleft()
            size = len(piece)
            if size > room:
                rest = max(counts - room, 0)
                self._ready.appendleft((piece[room:], rest))
                piece, size = piece[:room], room
                counts -= rest
            taken.append(piece)
            freed += counts
            room -= size
        # An empty part at the end must not leave the message without a last frame.
        parts = self.message.parts
        while self._opened < len(parts) and not parts[self._opened].nbytes:
            self._opened += 1
        return taken, limit_bytes - room, freed

    def _open_part(self) -> bool:
        """Make the next part's bytes ready, or its blocks wait; whether bytes are ready."""
        while not (self._to_compress or self._compressing) and self._opened < len(self._codecs):
            part, codec = self.message.parts[self._opened], self._codecs[self._opened]
            self._opened += 1
            if codec is not Codec.RAW:
                starts = range(0, part.nbytes, BLOCK_BYTES)
                self._to_compress.extend(part[at : at + BLOCK_BYTES] for at in starts)
            elif part.nbytes:
                self._ready.append((part, part.nbytes))
                return True
        return False


def _part_sizes(message: Message) -> list[int]:
    sizes = []
    for part in message.parts:
        if not (part.c_contiguous and part.itemsize == 1 and part.ndim == 1):
            raise InternalError(f"a part of message {message.kind!r} is not a flat byte buffer")
        sizes.append(part.nbytes)
    return sizes


def _joined(prefix: bytes, header: bytes, payload: list[memoryview], wire_bytes: int) -> Buffers:
    """What small buffers there are at the beginning, or all of a small frame, as one."""
    if not payload:
        return (prefix + header,)
    if wire_bytes <= JOIN_BYTES:
        return (b"".join((prefix, header, *payload)),)
    if header:  # the codecs come first then
        return (b"".join((prefix, header, payload[0])), *payload[1:])
    return (prefix, *payload)
