"""Snapshots offered, kept, reassigned, released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from p2ptrain.net.fields import FrameFields
from p2ptrain.net.forms import Count, Flat, Id, Key, Length, Text
from p2ptrain.recovery.state_report import StageCopy
from p2ptrain.recovery.version import VersionRow

VERSIONS_LIMIT = 8
"""Most versions named at once: those to go back to, and those that a checkpoint is written of."""

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
