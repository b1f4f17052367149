"""Which tensors of a state are read, as frame fields: `state.manifest`, then `state.read`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Flat, Id, Key, Rare


@dataclass(frozen=True, slots=True)
class StateKey(FrameFields):
    """Units [first, end) of a state that a device offers.

    Attributes:
        key: the job, and the generation that is prepared, where the state is on its way there for
            it; 0 = none, and what is not here is not waited for.
        source: the state's name.
    """

    key: Annotated[GenerationKey, Flat()]
    source: Id
    first: Count
    end: Count


@dataclass(frozen=True, slots=True)
class ManifestReply(FrameFields):
    """The CRC-32 of the manifest, which comes with it."""

    digest: Count


@dataclass(frozen=True, slots=True)
class RangeRequest(FrameFields):
    """Tensors [first, end) of the manifest, or bytes [begin, stop) of one.

    Attributes:
        manifest: its CRC-32.
        plain: uncompressed, since it is read beside training.
        again: what came was damaged: look whether it is whole there.
    """

    manifest: Count
    first: Annotated[Count, Key("from")]
    end: Annotated[Count, Key("to")]
    begin: Count | None = None
    stop: Count | None = None
    plain: Annotated[bool, Rare()] = False
    again: Annotated[bool, Rare()] = False

    def __post_init__(self) -> None:
        if self.first > self.end:
            raise ValueError(f"tensors {self.first} to {self.end}")
        if (self.begin is None) is not (self.stop is None):
            raise ValueError("a piece has a first and a last byte")
