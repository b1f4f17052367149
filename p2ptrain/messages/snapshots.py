"""Copies of stages: offered, kept, reassigned, released, and read.

A state is read as `state.manifest` first, then by `state.read`s of some of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from p2ptrain.messages.round_orders import VERSIONS_LIMIT, GenerationKey
from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Flat, Id, Key, Length, Rare, Text
from p2ptrain.recovery.state_report import StageCopy
from p2ptrain.recovery.version import VersionRow

REASON_LIMIT = 1024
"""Most characters of why something was not done."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer(FrameFields):
    """A device's copy of a stage, which the receiver is to keep too.

    Attributes:
        nbytes: of all tensors.
    """

    job: Id
    copy: Annotated[StageCopy, Flat()]
    nbytes: Annotated[Count, Key("bytes")]


@dataclass(frozen=True, slots=True)
class SnapshotKept(FrameFields):
    """What has become of an offer.

    Attributes:
        failed: why the copy is not kept; None = it is, whole.
    """

    job: Id
    copy: Annotated[StageCopy, Flat()]
    failed: Annotated[str, Text(REASON_LIMIT, clean=True)] | None = None


@dataclass(frozen=True, slots=True)
class BackupAssignment(FrameFields):
    """Copies of those units, from that version on, go to `backup_peer`, an id."""

    job: Id
    copy: Annotated[StageCopy, Flat()]
    backup_peer: Id


@dataclass(frozen=True, slots=True)
class RetainSnapshots(FrameFields):
    """Which versions of a job are kept, the stable one first; older ones go.

    Rebuilding a stage needs them from the first one on.
    """

    job: Id
    versions: Annotated[tuple[VersionRow, ...], Length(VERSIONS_LIMIT)]


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
