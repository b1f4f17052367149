"""What is asked of a device about a job, and what it answers, beside the parts of a message.

holder -> device:   generation.state_report, job.facts, profile.measure, links.measure,
                    generation.prepare, device.energy, job.end
device -> holder:   job.leaving;  job.over where it kept a job whose holder was gone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from p2ptrain.net.fields import DEVICES_LIMIT, LARGE, Blob, BlobLimit, FrameFields
from p2ptrain.net.forms import Bytes, Count, Id, Length, Range, Rare, Text
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.recovery.commit import Coefficient
from p2ptrain.recovery.compute_kind import PROCESSOR, ComputeKind
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.state_report import Speed
from p2ptrain.recovery.version import VersionRow

REASON_LIMIT_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class StateRequest(FrameFields):
    """Stop working on a job, and report its state here.

    Attributes:
        digest: of the job's model.
        generation: the generation that begins with this question.
        alive: the devices that the generation may use.
        apply: an update that counts elsewhere and is applied here before the answer.
        coefficient: of that update.
        rebuild: the stage that this device rebuilds before the answer.
    """

    job: Id
    digest: Id
    generation: Count
    alive: Annotated[frozenset[Id], Length(DEVICES_LIMIT)]
    apply: VersionRow | None = None
    coefficient: Coefficient | None = None
    rebuild: Rebuild | None = None


@dataclass(frozen=True, slots=True)
class FactsRequest(FrameFields):
    """What a device has measured of a model and offers, while its work continues."""

    job: Id
    digest: Id


@dataclass(frozen=True, slots=True)
class ModelRequest(FrameFields):
    """The description of a model, by its digest."""

    digest: Id


@dataclass(frozen=True, slots=True)
class JobQuestion(FrameFields):
    """About one job: may this device leave it; is it over?"""

    job: Id


@dataclass(frozen=True, slots=True)
class JobEnd(FrameFields):
    """A job is over; its state may go."""

    job: Id
    reason: Annotated[str, Text(REASON_LIMIT_CHARACTERS, clean=True)]


@dataclass(frozen=True, slots=True)
class JobOver(FrameFields):
    """Whether the device that is asked has ended that job of its own."""

    over: bool


@dataclass(frozen=True, slots=True)
class JobKept(FrameFields):
    """What a device keeps of a job of the device that asks; nothing, without a job."""

    job: Id | None = None
    generation: Annotated[Count, Rare()] = 0
    newest: VersionRow | None = None


@dataclass(frozen=True, slots=True)
class LeaveReply(FrameFields):
    """Whether a device may leave: why not, or None."""

    refused: Annotated[str, Text(REASON_LIMIT_CHARACTERS, clean=True)] | None = None


@dataclass(frozen=True, slots=True)
class PrepareRequest(FrameFields):
    """Fetch and build the stages of the assignment that comes with it.

    Attributes:
        needed: what the plan takes on this device.
        gather: only fetch, for the device with the data; no stage is built.
    """

    needed: MemoryBudgets
    gather: Annotated[bool, Rare()] = False


@dataclass(frozen=True, slots=True)
class PrepareReply(FrameFields):
    """Whether a device is ready for a generation, and what was in the way.

    Attributes:
        moved_bytes: weights that came over the network.
        source: the device that did not send what this one asked for.
        short: this device has too little memory.
    """

    ready: bool
    moved_bytes: Bytes = 0
    reason: Annotated[str, Text(REASON_LIMIT_CHARACTERS, clean=True), Rare()] = ""
    source: Id | None = None
    short: MemoryShortage | None = None


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


def samples_per_s(measured: Mapping[str, Any]) -> float | None:
    """Of the whole model, in its largest measured batch; None where it was not measured."""
    times = measured.get("times")
    if not times:
        return None
    size = max(times, key=int)
    seconds: float = sum(sum(times[size][part]) for part in ("forward", "backward"))
    return int(size) / seconds if seconds > 0 else None


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
