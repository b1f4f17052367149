"""Which protocol a device speaks and which p2ptrain it runs: first on links, and in pairing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from p2ptrain._version import PROTOCOL_VERSION, __version__
from p2ptrain.net.fields import printable
from p2ptrain.net.forms import Range, Text

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
