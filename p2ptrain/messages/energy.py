"""What a device has used of energy, as the holder of its job asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Length, Range, Text

MOST_JOULES = 1e15

_Words: TypeAlias = Annotated[str, Text(200, clean=True)]


@dataclass(frozen=True, slots=True)
class EnergyReply(FrameFields):
    """Since that device's process began.

    Attributes:
        joules: None: it cannot be measured.
        sources: what is counted.
        why: what is not, or why nothing is.
    """

    joules: Annotated[float, Range(0.0, MOST_JOULES)] | None
    sources: Annotated[tuple[_Words, ...], Length(4)]
    why: _Words
