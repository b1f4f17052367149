"""The CBOR header of a message: what it is, its fields, and the sizes of its parts.

    [kind, fields, [raw bytes of each part], [PartKind of each part] or []]

Decoded before a byte of the body is read, so everything here is hostile until checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.errors import InternalError, ProtocolError
from p2ptrain.net import cbor
from p2ptrain.net.message import HEADER_LIMIT_BYTES, Fields, PartKind

HEADER_DEPTH_LIMIT = 8
"""Containers within one another, the header's own list and the fields' dict included."""
PARTS_LIMIT = 1024
PART_LIMIT_BYTES = 2**40

_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PART_KINDS = tuple(PartKind)
_MOST_PART_KIND = int(max(PartKind))


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
    if not _integers(part_kinds, _MOST_PART_KIND) or len(part_kinds) not in (0, len(part_bytes)):
        return "part kinds do not fit the parts"
    return None


def _integers(items: object, most: int) -> bool:
    """Whether `items` is a list of integers in [0, most]; True and False are not integers here."""
    if not isinstance(items, list):
        return False
    return not [n for n in items if type(n) is not int or not 0 <= n <= most]
