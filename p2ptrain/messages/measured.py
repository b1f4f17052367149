"""What a device answers when it is asked to measure itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from p2ptrain.net.fields import LARGE, Blob, BlobLimit, FrameFields
from p2ptrain.net.forms import Bytes, Id, Length, Range, Text
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.recovery.state_report import Speed

LINKS_LIMIT = 64
"""Most links that are measured for one question."""

MOST_SAMPLES = 1 << 20
"""Of a size that is asked for."""


@dataclass(frozen=True, slots=True)
class ProfileAsked(FrameFields):
    """Measure a model.

    Attributes:
        job: that it is of.
        digest: of the model.
        holder: id of the device that has it.
        batch_sizes: to measure, in samples; none: say only what memory there is.
        largest_second: every other device continues from the smallest size to the largest.
        company: work on until all have measured.
        most: samples that a micro-batch may have; an accelerator measures up to there. 0: there are
            no other sizes than those of `batch_sizes`.
    """

    job: Id
    digest: Id
    holder: Id
    batch_sizes: Annotated[tuple[Annotated[int, Range(1, MOST_SAMPLES)], ...], Length(16)] = ()
    largest_second: bool = False
    company: bool = False
    most: Annotated[int, Range(0, MOST_SAMPLES)] = 0


@dataclass(frozen=True, slots=True)
class ProfileAnswer(Blob):
    """Unit times, and memory.

    Attributes:
        measured: the profile, which planning checks; empty where no sizes were asked for.
        memory: what the device offers.
        taken_bytes: what the job has taken of the host's there already.
        compute: with what it was measured.
    """

    LIMIT: ClassVar[BlobLimit] = LARGE

    measured: Mapping[str, Any]
    memory: MemoryBudgets
    taken_bytes: Bytes
    compute: ComputeKind = PROCESSOR


@dataclass(frozen=True, slots=True)
class LinksAsked(FrameFields):
    """Measure what can be sent to some members; `again`: keep the faster of both measurements."""

    peers: Annotated[tuple[Id, ...], Length(LINKS_LIMIT)]
    again: bool = False


@dataclass(frozen=True, slots=True)
class LinksAnswer(FrameFields):
    """What was found, of those that could be measured."""

    speeds: Annotated[tuple[Speed, ...], Length(LINKS_LIMIT)]


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
