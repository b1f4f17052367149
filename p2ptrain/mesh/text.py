"""Text that came from a peer, made safe to show and to keep.

Names and error texts end in terminals, logs and files. Control bytes could move a terminal's cursor
or forge a log line, bidirectional marks could make a name read as another one (Unicode TR 36), so
everything that is not plainly printable is replaced at the door.
"""

from __future__ import annotations

import unicodedata

from p2ptrain.errors import OptionError

NAME_LIMIT_CHARACTERS = 48
"""Longest device name; NAME-2 may take a few characters more."""

_REPLACEMENT = "?"
_FORBIDDEN_IN_NAMES = frozenset('/\\:*?"<>|')
_UNPRINTABLE = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})


def printable(text: str, limit_characters: int) -> str:
    """`text` cut to `limit_characters`, with control and bidirectional marks replaced."""
    cut = text[:limit_characters]
    return "".join(c if unicodedata.category(c) not in _UNPRINTABLE else _REPLACEMENT for c in cut)


def peer_name(text: str) -> str:
    """A peer's name as it may be shown; never empty, never a path."""
    shown = "".join(
        "_" if c in _FORBIDDEN_IN_NAMES else c for c in printable(text, NAME_LIMIT_CHARACTERS + 4)
    )
    return shown.strip(" .") or "unnamed"


def checked_name(text: str) -> str:
    """The name this device's person chose.

    Raises:
        OptionError: it is empty, too long or holds characters a name may not have.
    """
    name = text.strip()
    if not name or len(name) > NAME_LIMIT_CHARACTERS or peer_name(name) != name:
        raise OptionError(
            f"the device name {printable(text, 60)!r} cannot be used: give 1 to "
            f'{NAME_LIMIT_CHARACTERS} printable characters without / \\ : * ? " < > |'
        )
    return name
