"""Bodies of control messages in parts: of bounded size, only for the right sender, as forms.

Memory for a blob is allowed before it is taken: by its kind's limit, and by its sender. A blob from
a device that has no business here is read and dropped; the handler, which asks the same question
first, answers why. (Tensors: runtime/io/tensor_receiver.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

from p2ptrain.errors import Error, ProtocolError
from p2ptrain.net import cbor
from p2ptrain.net.message import Fields, Message, PartsAllocator
from p2ptrain.net.read_form import read_form
from p2ptrain.net.write_form import write_form

Due: TypeAlias = Callable[[str, Fields], None]
"""(peer, header fields) -> nothing, or an error of ours that says why this is not for that peer."""


@dataclass(frozen=True, slots=True)
class BlobLimit:
    """Of one kind of blob: most bytes, and most CBOR items. An item takes up to 72 bytes."""

    most_bytes: int
    most_items: int


SMALL = BlobLimit(256 << 10, 16_384)

LARGE = BlobLimit(4 << 20, 200_000)
"""Of plans, profiles and manifests: of 1,000 units on 16 devices."""

HOUSEHOLD = BlobLimit(16 << 20, 1_000_000)
"""Of the profiles of all devices together."""


def limited(limit_bytes: int, count: int = 1, due: Due | None = None) -> PartsAllocator:
    """An allocator for `count` blobs of at most `limit_bytes` together, from whom they are due."""

    def allocate(peer: str, fields: Fields, sizes: Sequence[int]) -> list[memoryview] | None:
        if len(sizes) != count or sum(sizes) > limit_bytes:
            raise ProtocolError(f"{count} parts of at most {limit_bytes} bytes were expected")
        if due is not None:
            try:
                due(peer, fields)
            except Error:
                return None
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


def decoded(data: bytes | memoryview, limit: BlobLimit) -> Any:
    """Plain data. Raises ProtocolError."""
    return cbor.loads(bytes(data), limit.most_bytes, items_limit=limit.most_items)


class Blob:
    """A form that travels as a part."""

    __slots__ = ()

    LIMIT: ClassVar[BlobLimit] = SMALL

    def to_bytes(self) -> bytes:
        """Strict CBOR."""
        return cbor.dumps(write_form(self))

    def to_part(self) -> memoryview:
        """The same, as messages carry it."""
        return memoryview(self.to_bytes())

    def check(self) -> None:
        """Raises ProtocolError: its fields do not fit each other."""

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Check and read. Raises ProtocolError."""
        form = read_form(cls, decoded(data, cls.LIMIT), cls.__name__)
        form.check()
        return form
