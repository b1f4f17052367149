"""What a picture and a label may be, and the names of both in a folder. Pure.

Only what every browser and torchvision read is taken: JPEG, PNG, WebP. The page draws a picture new
before it sends it, which leaves out what the camera wrote (EXIF, XMP: the place, among others), so
a picture that still has it did not come from the page.

Pictures lie at label/digest.jpg, as torchvision's ImageFolder reads it. A label becomes a folder's
name on whatever file system the holder has, and perhaps on another one later, so what any common
one refuses is refused at once.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from enum import StrEnum

from p2ptrain.errors import UserError
from p2ptrain.net.forms import is_shown


class PictureKind(StrEnum):
    """By its media type."""

    JPEG = "image/jpeg"
    PNG = "image/png"
    WEBP = "image/webp"

    @property
    def suffix(self) -> str:
        """Of its file."""
        return ".jpg" if self is PictureKind.JPEG else f".{self.name.lower()}"


_HEIC = (
    "a HEIC picture, which no training reads: choose it in the phone's own browser, which hands "
    "over JPEG, or set the camera to JPEG (on an iPhone: Formats, Most Compatible)"
)

_PNG_BEGIN = b"\x89PNG\r\n\x1a\n"

_TELLING_CHUNKS = frozenset({b"eXIf", b"EXIF", b"XMP "})

_XMP = b"http://ns.adobe.com/xap/1.0/"


def picture_kind(content: bytes) -> PictureKind | None:
    """What the first bytes say that it is."""
    if content.startswith(b"\xff\xd8\xff"):
        return PictureKind.JPEG
    if content.startswith(_PNG_BEGIN):
        return PictureKind.PNG
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return PictureKind.WEBP
    return None


def checked_picture(content: bytes) -> PictureKind:
    """What kind of picture it is.

    Raises:
        UserError: it is none, is not whole, or carries metadata.
    """
    kind = picture_kind(content)
    if kind is None:
        raise UserError(f"this is {_described(content)}")
    chunks = {
        PictureKind.JPEG: _jpeg_segments,
        PictureKind.PNG: _png_chunks,
        PictureKind.WEBP: _webp_chunks,
    }[kind]
    is_whole = False
    for name, begin in chunks(content):
        if name == b"end":
            is_whole = True
        elif name in _TELLING_CHUNKS or begin.startswith((b"Exif\0", _XMP, b"XML:com.adobe.xmp")):
            raise UserError(
                "this picture still has what its camera wrote into it, such as the place: "
                "send it from the page, which leaves that out"
            )
    if not is_whole:
        raise UserError("this picture is not whole: send it again")
    return kind


def _described(content: bytes) -> str:
    if not content:
        return "an empty file"
    brand = content[8:12]
    if content[4:8] == b"ftyp" and brand in (b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1"):
        return _HEIC
    return "no picture that a training reads: send JPEG, PNG or WebP"


_Chunk = tuple[bytes, bytes]
"""Its name, and how it begins; b"end" comes last, and only of a whole file."""


def _jpeg_segments(content: bytes) -> Iterator[_Chunk]:
    at = 2
    while content[at : at + 1] == b"\xff" and at + 4 <= len(content):
        marker, size = content[at + 1], int.from_bytes(content[at + 2 : at + 4], "big")
        if marker == 0xDA:  # what follows is the picture itself
            if content.rstrip(b"\0").endswith(b"\xff\xd9"):
                yield b"end", b""
            return
        if size < 2:
            return
        if marker == 0xE1:
            yield b"APP1", content[at + 4 : at + 2 + min(size, 64)]
        at += 2 + size


def _png_chunks(content: bytes) -> Iterator[_Chunk]:
    at = len(_PNG_BEGIN)
    while at + 12 <= len(content):
        size, name = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        if name == b"IEND":
            yield b"end", b""
            return
        yield name, content[at + 8 : at + 8 + min(size, 64)]
        at += 12 + size


def _webp_chunks(content: bytes) -> Iterator[_Chunk]:
    end, at = 8 + int.from_bytes(content[4:8], "little"), 12
    while at + 8 <= min(end, len(content)):
        size, name = int.from_bytes(content[at + 4 : at + 8], "little"), content[at : at + 4]
        yield name, content[at + 8 : at + 8 + min(size, 64)]
        at += 8 + size + size % 2
    if at == end <= len(content):
        yield b"end", b""


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
