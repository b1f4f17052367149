"""Text and numbers from a peer, checked and made safe to show and to store.

Names and error texts end in terminals, logs and files. Control bytes could move a terminal's cursor
or forge a log line, bidirectional marks could make a name read as another one (Unicode TR 36), so
everything that is not plainly printable is replaced on arrival.

Every name in the household has one spelling: composed characters, and one plain space between
words, whatever spaces were typed (a wide one, as in Japanese, or one that does not break). So the
same name is the same text on every device.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from p2ptrain.errors import OptionError
from p2ptrain.net.forms import By
from p2ptrain.net.read_form import one_line, read_form
from p2ptrain.net.write_form import write_form

NAME_LIMIT_CHARACTERS = 48
"""Longest device name; NAME-2 may take a few characters more."""

_LOOKED_AT = 4 * NAME_LIMIT_CHARACTERS
"""Characters of a peer's text that can be part of a name: composed ones may come as several."""

_REPLACEMENT = "?"

_FORBIDDEN_IN_NAMES = frozenset('/\\:*?"<>|')

_UNPRINTABLE = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})


def printable(text: str, limit_characters: int) -> str:
    """`text` cut to `limit_characters`, with control and bidirectional marks replaced."""
    cut = text[:limit_characters]
    return "".join(c if unicodedata.category(c) not in _UNPRINTABLE else _REPLACEMENT for c in cut)


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
