"""What a message carries, checked: fields and parts as forms, and texts that are safe to show.

Names and error texts end in terminals, logs and files. Control bytes could move a terminal's cursor
or forge a log line, bidirectional marks could make a name read as another one (Unicode TR 36), so
everything that is not plainly printable is replaced on arrival.

Every name in the household has one spelling: composed characters, and one plain space between
words, whatever spaces were typed (a wide one, as in Japanese, or one that does not break). So the
same name is the same text on every device.

Memory for a blob is allowed before it is taken: by its kind's limit, and by its sender. A blob from
a device that has no business here is read and dropped; the handler, which asks the same question
first, answers why. (Tensors: runtime/io/tensor_receiver.py.)
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.errors import Error, OptionError, ProtocolError
from p2ptrain.net import cbor
from p2ptrain.net.forms import By, Range, Text, is_shown, one_line, write_form
from p2ptrain.net.message import Fields, Message, PartsAllocator
from p2ptrain.net.read_form import read_form

NAME_LIMIT_CHARACTERS = 48
"""Longest device name; NAME-2 may take a few characters more."""

_LOOKED_AT = 4 * NAME_LIMIT_CHARACTERS
"""Characters of a peer's text that can be part of a name: composed ones may come as several."""

_REPLACEMENT = "?"

_FORBIDDEN_IN_NAMES = frozenset('/\\:*?"<>|')


def printable(text: str, limit_characters: int) -> str:
    """`text` cut to `limit_characters`, with control and bidirectional marks replaced."""
    cut = text[:limit_characters]
    return "".join(c if is_shown(c) else _REPLACEMENT for c in cut)


def peer_name(text: str) -> str:
    """A peer's name as it may be shown; never empty, never a path."""
    shown = "".join("_" if c in _FORBIDDEN_IN_NAMES else c for c in printable(text, _LOOKED_AT))
    return as_written(shown)[: NAME_LIMIT_CHARACTERS + 4].strip(" .") or "unnamed"


def _read_name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a name, found something else")
    return peer_name(value)


PeerName: TypeAlias = Annotated[str, By(_read_name, str)]
"""Of a device, in a form: one that no device may have becomes one that it may."""


def as_written(name: str) -> str:
    """A name in the one way in which the household writes it."""
    spaced = "".join(" " if unicodedata.category(c) == "Zs" else c for c in name)
    return " ".join(word for word in unicodedata.normalize("NFC", spaced).split(" ") if word)


def checked_name(text: str) -> str:
    """The name that this device's user chose.

    Raises:
        OptionError: it is empty, too long or holds characters a name may not have.
    """
    name = as_written(text.strip())
    if not name or len(name) > NAME_LIMIT_CHARACTERS or peer_name(name) != name:
        raise OptionError(
            f"the device name {printable(text, 60)!r} cannot be used: give 1 to "
            f'{NAME_LIMIT_CHARACTERS} printable characters without / \\ : * ? " < > |'
        )
    return name


DEVICES_LIMIT = 4096
"""Most entries of a list of devices or ranges, far above any household's."""


def shown(value: str) -> str:
    """A peer's text as one line, without what would move a terminal's cursor or hide the rest."""
    return one_line(value) or "?"


class FrameFields:
    """A form whose fields stand in a frame's header, beside those of others."""

    __slots__ = ()

    def fields(self) -> dict[str, Any]:
        """As frame fields."""
        return write_form(self)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Check and read them. Raises ProtocolError."""
        return read_form(cls, fields, cls.__name__, extra=True)


def check_units(first: int, end: int) -> None:
    """ValueError where [first, end) is empty."""
    if not first < end:
        raise ValueError(f"layers {first} to {end} are none")


Version: TypeAlias = Annotated[int, Range(1, 2**31)]

Software: TypeAlias = Annotated[str, Text(64, clean=True)]


@dataclass(frozen=True, slots=True)
class Spoken:
    """As far as another version's first message is read: the rest may mean anything."""

    version: Version
    software: Software = "unknown"


def mismatch(version: int, software: str) -> str:
    """What users read where another device speaks another protocol version."""
    return (
        f"this device speaks protocol version {PROTOCOL_VERSION} (p2ptrain {__version__}), the "
        f"other one {version} (p2ptrain {printable(software, 32)}): install the same p2ptrain on "
        "both"
    )


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
