"""A handler's error as fields of a reply, and back.

Only names of p2ptrain's own error tree travel, with a short text: nothing a peer sends chooses
what code runs here. A name that we do not know becomes a plain `PeerError`.
"""

from __future__ import annotations

from p2ptrain import errors
from p2ptrain.mesh.text import printable
from p2ptrain.net.message import Fields

TEXT_LIMIT_BYTES = 1024


def _tree(root: type[errors.Error]) -> dict[str, type[errors.Error]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:  # others' are made otherwise, and mean nothing here
            found.update(_tree(child))
    return found


_CLASSES = _tree(errors.Error)


def to_fields(error: errors.Error) -> dict[str, str]:
    """The error's class name and text, cut to `TEXT_LIMIT_BYTES`."""
    text = str(error).encode()[:TEXT_LIMIT_BYTES].decode(errors="ignore")
    fields = {"error": type(error).__name__, "text": text}
    if isinstance(error, errors.DeviceLost):
        fields["device"] = error.name[:64]
    return fields


def from_fields(fields: Fields) -> errors.Error:
    """The error that `fields` describe, of a class from our own tree."""
    text = printable(str(fields.get("text", "")), TEXT_LIMIT_BYTES)
    cls = _CLASSES.get(str(fields.get("error")), errors.PeerError)
    if issubclass(cls, errors.DeviceLost):
        return cls(text, name=printable(str(fields.get("device", "")), 64))
    return cls(text)
