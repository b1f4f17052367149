"""Names in a folder of pictures: label/digest.jpg, as torchvision's ImageFolder reads it. Pure.

A label becomes a folder's name on whatever file system the holder has, and perhaps on another one
later, so what any common one refuses is refused at once.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from p2ptrain.errors import UserError
from p2ptrain.net.forms import is_shown
from p2ptrain.photos.picture import PictureKind

LABEL_CHARACTERS = 60

_FILE_NAME_BYTES = 200

_NOT_IN_NAMES = frozenset('/\\:*?"<>|')

_RESERVED = frozenset({"con", "prn", "aux", "nul"}) | {
    f"{device}{number}" for device in ("com", "lpt") for number in range(1, 10)
}
"""Of Windows, with any suffix."""

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Of what is shown: what a browser and ImageFolder both read."""


def label_named(text: str, known: Iterable[str] = ()) -> str:
    """The label that a person means: one of `known` where it differs in case alone.

    Raises:
        UserError: it cannot be a folder's name everywhere; says why.
    """
    label = " ".join(unicodedata.normalize("NFC", text).split())
    for other in known:
        if _folded(other) == _folded(label):
            return other
    why = _why_no_label(label)
    if why is not None:
        raise UserError(f"that cannot be a label: {why}")
    return label


def _why_no_label(label: str) -> str | None:
    if not label:
        return "it is empty"
    if len(label) > LABEL_CHARACTERS or len(label.encode("utf-8", "replace")) > _FILE_NAME_BYTES:
        return f"it is longer than {LABEL_CHARACTERS} characters"
    if not all(map(is_shown, label)):
        return "it has a character that cannot be shown"
    wrong = sorted(_NOT_IN_NAMES.intersection(label))
    if wrong:
        return f"it has a {wrong[0]}, which no folder can have everywhere"
    if label[0] == "." or label[-1] == ".":
        return "it begins or ends with a dot"
    if label.partition(".")[0].casefold().strip() in _RESERVED:
        return "Windows keeps that name for itself"
    return None


def _folded(label: str) -> str:
    """Equal for names that one folder cannot both have on a Mac or on Windows."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", label).casefold())


def picture_named(content: bytes, kind: PictureKind) -> str:
    """The file's name: the same picture has the same one, from whichever phone it comes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest() + kind.suffix


def is_picture_name(name: str) -> bool:
    """Whether a file of that name may be shown and moved; it need not be of this page."""
    return (
        name.lower().endswith(_SUFFIXES)
        and name[0] != "."
        and not {"/", "\\"}.intersection(name)
        and all(map(is_shown, name))
        and len(name.encode("utf-8", "replace")) <= _FILE_NAME_BYTES
    )
