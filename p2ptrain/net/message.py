"""What travels between two devices: a small header and, beside it, raw bytes.

    Message  =  kind + fields (CBOR, at most HEADER_LIMIT_BYTES)  +  parts (raw bytes)

Parts are where tensors travel: they are sent from, and received into, memory that the caller owns.
The receiver of a message decides where each part goes, and how large it may be, *before* a byte of
it is read (`PartsAllocator`): sizes come from the receiver's own plan, never from the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

HEADER_LIMIT_BYTES = 4096
"""Most bytes the CBOR header may take. Larger things travel as parts, capped by their receiver."""

Fields: TypeAlias = Mapping[str, Any]
"""CBOR-able: None, bool, int (64 bit), float, str, bytes, list and dict with text keys."""


class Priority(IntEnum):
    """Lanes of a link, most urgent first. A lower lane waits at every chunk border."""

    CONTROL = 0
    """Heartbeats, votes, commands."""
    TENSOR = 1
    """Activations and gradients: a device is waiting for them."""
    COLLECTIVE = 2
    """All-reduce and tied-gradient sums."""
    BULK = 3
    """Weights, checkpoints, profiles."""
    REPLICA = 4
    """Copies against a death that has not come: what no other lane needs."""


class PartKind(IntEnum):
    """What a part holds, so that compression is decided where it pays (measured per kind)."""

    OPAQUE = 0
    """Already dense or tiny: never compressed."""
    ACTIVATION = 1
    GRADIENT = 2
    WEIGHT = 3
    INPUT = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: dotted name such as "train.forward"; at most 64 characters.
        fields: the CBOR header's content.
        parts: C-contiguous byte buffers (`memoryview` of format "B").
        part_kinds: one `PartKind` a part, or empty for all `OPAQUE`.
        header_bytes: what the header of a received one took on the link; 0 for one made here.
        on_sent: called when the link has handed all of it to the stream.
    """

    kind: str
    fields: Fields = field(default_factory=dict)
    parts: tuple[memoryview, ...] = ()
    part_kinds: tuple[PartKind, ...] = ()
    header_bytes: int = field(default=0, compare=False)
    on_sent: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def parts_bytes(self) -> int:
        """Bytes of all parts before any compression."""
        return sum(part.nbytes for part in self.parts)


PartsAllocator: TypeAlias = Callable[[str, Fields, Sequence[int]], Sequence[memoryview] | None]
"""(peer id, header fields, raw sizes in bytes as the peer claims) -> writable buffers of exactly
those sizes; None = they are read and thrown away, and the message comes without them. Raises
ProtocolError where they are not the ones expected; the link then closes."""
