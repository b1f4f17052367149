"""The course of a job so far: what a page or a program shows that comes in the middle of it.

Pure. The holder keeps it from its own events; `since` is what one who has the rest still lacks, and
`joined` puts the two together. It stays small however long the job is: of the steps those are kept
whose number `stride` divides, and the stride doubles when they become too many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from p2ptrain import events
from p2ptrain.console import describe, layers_text, plan_head
from p2ptrain.net.fields import LARGE, Blob, FrameFields
from p2ptrain.net.forms import Bytes, Count, Id, Length, Positive, Range, Rare, Row, Seconds, Text

POINTS_LIMIT = 1024

NOTES_LIMIT = 120

EVALS_LIMIT = 256

NAMES_LIMIT = 64

EARLIER_RUNS = 5

EARLIER_MODELS = 12

EARLIER_POINTS = 128

LINKS_LIMIT = 1024

TEXT_LIMIT_CHARACTERS = 1000

_Name: TypeAlias = Annotated[str, Text(64, clean=True)]

_Sentence: TypeAlias = Annotated[str, Text(TEXT_LIMIT_CHARACTERS, clean=True)]

_Rate: TypeAlias = Annotated[float, Range(0.0)]

JobState: TypeAlias = Literal[
    "starting", "training", "waiting", "paused", "done", "failed", "stopped"
]

REPORTED = "of "
"""How a run begins that has no name of its own."""

ENDED: frozenset[str] = frozenset({"done", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class CoursePoint:
    """One step; what is not a number is None.

    Attributes:
        seconds: since the job began, without a person's pauses.
    """

    step: Count
    seconds: Seconds
    loss: float | None
    samples_per_s: float | None
    lr: float | None


@dataclass(frozen=True, slots=True)
class CourseMetrics:
    """An evaluation."""

    step: Count
    metrics: Annotated[Mapping[str, float], Length(NAMES_LIMIT)]


@dataclass(frozen=True, slots=True)
class CourseNote:
    """Something that happened, in words.

    Attributes:
        kind: the event's.
    """

    seconds: Seconds
    kind: _Name
    text: _Sentence


@dataclass(frozen=True, slots=True)
class CourseShare:
    """A device's part of a stage."""

    name: _Name
    share: Count


@dataclass(frozen=True, slots=True)
class CourseStage:
    """Units [first, end) and the devices that compute them.

    Attributes:
        layers: their names, from the first to the last.
        shares: what they count: "samples", "micro_batches" or "tiles".
    """

    units: tuple[Count, Count]
    devices: Annotated[tuple[CourseShare, ...], Length(256)]
    layers: _Sentence
    shares: _Name


@dataclass(frozen=True, slots=True)
class CourseLeftOut:
    """A device without a part, and why."""

    name: _Name
    reason: _Sentence


@dataclass(frozen=True, slots=True)
class CourseLink:
    """One direction of a link, as it was measured for the plan."""

    sender: _Name
    receiver: _Name
    bytes_per_s: _Rate
    latency_s: Seconds


@dataclass(frozen=True, slots=True)
class CoursePlan:
    """The plan in force.

    Attributes:
        head: why there is a plan, how a batch is computed, how fast that should be.
        peak_bytes: by device, the memory it needs where it computes.
        host_bytes: by device, of the host's beside a card's own.
        alone_samples_per_s: by device, what it would do without the others.
    """

    epoch: Count
    head: _Sentence
    stages: Annotated[tuple[CourseStage, ...], Length(256)]
    left_out: Annotated[tuple[CourseLeftOut, ...], Length(256)]
    predicted_samples_per_s: float | None
    micro_batch: Count
    micro_batches: Count
    peak_bytes: Annotated[Mapping[str, Bytes], Length(256)]
    changes_results: Annotated[tuple[_Sentence, ...], Length(64)] = ()
    links: Annotated[tuple[Annotated[CourseLink, Row()], ...], Length(LINKS_LIMIT)] = ()
    alone_samples_per_s: Annotated[Mapping[str, _Rate], Length(256)] = field(default_factory=dict)
    host_bytes: Annotated[Mapping[str, Bytes], Length(256)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EarlierPoint:
    """A step of a run that has ended."""

    step: Count
    loss: float


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run of the same model on the same device, for comparison.

    Attributes:
        ended_at: Unix seconds, by that device's clock.
    """

    run: Id
    ended_at: Count
    state: JobState
    points: Annotated[tuple[Annotated[EarlierPoint, Row()], ...], Length(EARLIER_POINTS)]


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """What a device keeps of its runs, by the model; of each and in all the newest."""

    models: Annotated[
        Mapping[str, Annotated[tuple[EarlierRun, ...], Length(EARLIER_RUNS)]],
        Length(EARLIER_MODELS),
    ] = field(default_factory=dict)

    def of(self, model: str) -> tuple[EarlierRun, ...]:
        """The oldest first."""
        return self.models.get(model, ())

    def with_run(self, model: str, course: JobCourse, ended_at: int) -> EarlierRuns:
        """One more; the oldest goes."""
        known = [p for p in course.points if p.loss is not None]
        every = -(-len(known) // EARLIER_POINTS) or 1
        points = tuple(EarlierPoint(p.step, p.loss or 0.0) for p in known[every - 1 :: every])
        if len(points) < 2:
            return self
        run = EarlierRun(course.run, ended_at, course.state, points)
        rest = {name: runs for name, runs in self.models.items() if name != model}
        kept = dict(list(rest.items())[-(EARLIER_MODELS - 1) :])
        return EarlierRuns({**kept, model: (*self.of(model), run)[-EARLIER_RUNS:]})


@dataclass(frozen=True, slots=True)
class JobCourse(Blob):
    """See the module.

    Attributes:
        run: of this course; another run of the same job has another one.
        holder: name of the device with the data.
        state: "waiting": it stands still until a device is back; "paused": until a person says so.
        message: the error of one that failed; the device that is waited for, or that has paused it.
        seconds: since the job began.
        steps: of the whole job; None where that is not known.
        last: the newest step.
        first: updates that were made before this run.
        limit: what limits it now, in a sentence.
        energy: what its devices have used, or why that is not known; "" before they are asked.
        tokens_per_sample: of the newest step; None where samples are no sequences of token ids.
        earlier: runs of the same model, the newest last; not where `is_rest`.
        is_rest: `points` are only those after what was asked for.
    """

    LIMIT = LARGE

    run: Id
    holder: _Name
    model: Annotated[str, Text(256, clean=True)]
    state: JobState = "starting"
    message: Annotated[_Sentence, Rare()] = ""
    seconds: Seconds = 0.0
    steps: Count | None = None
    first: Annotated[Count, Rare()] = 0
    last: Annotated[CoursePoint, Row()] | None = None
    stride: Positive = 1
    points: Annotated[tuple[Annotated[CoursePoint, Row()], ...], Length(2 * POINTS_LIMIT)] = ()
    evals: Annotated[tuple[CourseMetrics, ...], Length(EVALS_LIMIT)] = ()
    notes: Annotated[tuple[CourseNote, ...], Length(NOTES_LIMIT)] = ()
    plan: CoursePlan | None = None
    limit: Annotated[_Sentence, Rare()] = ""
    energy: Annotated[_Sentence, Rare()] = ""
    tokens_per_sample: Annotated[_Rate | None, Rare()] = None
    earlier: Annotated[tuple[EarlierRun, ...], Length(EARLIER_RUNS), Rare()] = ()
    is_rest: Annotated[bool, Rare()] = False

    @property
    def is_reported_only(self) -> bool:
        """Its holder gives no course: this is made of its progress lines."""
        return self.run.startswith(REPORTED)


@dataclass(frozen=True, slots=True)
class CourseAsked(FrameFields):
    """The course of the job that the asked device holds.

    Attributes:
        run, stride, step: what the asking device has: points up to that step.
    """

    run: Id = ""
    stride: Positive = 1
    step: Count = 0


class CourseKeeper:
    """Keeps the course of one job, on the device that has the data."""

    def __init__(
        self,
        run: str,
        holder: str,
        model: str,
        steps: int | None,
        limit: int = POINTS_LIMIT,
        earlier: tuple[EarlierRun, ...] = (),
    ) -> None:
        self.course = JobCourse(run, holder, model, steps=steps, earlier=earlier)
        self._points: list[CoursePoint] = []
        self._limit = limit
        self._paused_at: float | None = None
        self._paused_by = ""
        self._paused_seconds = 0.0

    def note(self, event: events.Event, seconds: float) -> None:
        """`event` has happened, so many seconds after the job began."""
        if isinstance(event, events.Step):
            return self._step(event, seconds)
        if isinstance(event, events.Plan):
            self._change(plan=self._with_speeds(_plan(event)))
        elif isinstance(event, events.Eval):
            finite = {name: v for name, v in event.metrics.items() if math.isfinite(v)}
            metrics = dict(list(finite.items())[:NAMES_LIMIT])
            self._change(
                evals=(*self.course.evals, CourseMetrics(event.step, metrics))[-EVALS_LIMIT:]
            )
        elif isinstance(event, events.Waiting):
            self._change(state="waiting", message=event.waiting_for)
        elif isinstance(event, events.Paused):
            self._paused_at, self._paused_by = seconds, event.by
            self._change(state="paused", message=event.by)
        elif isinstance(event, events.Resumed):
            self._paused_seconds = seconds - self._trained(seconds)
            self._paused_at = None
            self._change(state="training" if self.course.last else "starting", message="")
        elif isinstance(event, events.Done):
            self._change(state="done", message="")
        elif isinstance(event, events.Error):
            self._change(state="failed", message=event.message[:TEXT_LIMIT_CHARACTERS])
        text = plan_head(event) if isinstance(event, events.Plan) else describe(event)
        if text and not isinstance(event, events.Eval):
            note = CourseNote(seconds, event.event, text[:TEXT_LIMIT_CHARACTERS])
            self._change(notes=(*self.course.notes, note)[-NOTES_LIMIT:])
        return None

    def stopped(self) -> None:
        """The job ends now, and nothing has said so: it was stopped."""
        if self.course.state not in ENDED:
            self._change(state="stopped", message="")

    def since(
        self, asked: CourseAsked, seconds: float, limit: str = "", energy: str = ""
    ) -> JobCourse:
        """What one who has that of the course lacks of it.

        Args:
            seconds: since the job began.
            limit: what limits it now.
            energy: what it has used.
        """
        knows = asked.run == self.course.run and asked.stride == self.course.stride
        points = self._points[self._index_after(asked.step) :] if knows else self._points
        limit = limit[:TEXT_LIMIT_CHARACTERS] if self.course.state == "training" else ""
        return replace(
            self.course,
            seconds=seconds,
            points=tuple(points),
            limit=limit,
            energy=energy[:TEXT_LIMIT_CHARACTERS],
            earlier=() if knows else self.course.earlier,
            is_rest=knows,
        )

    def _index_after(self, step: int) -> int:
        """Of the first point after that step; new ones stand at the end."""
        index = len(self._points)
        while index and self._points[index - 1].step > step:
            index -= 1
        return index

    def _step(self, event: events.Step, seconds: float) -> None:
        numbers = (_finite(event.loss), _finite(event.samples_per_s), _finite(event.lr))
        point = CoursePoint(event.step, self._trained(seconds), *numbers)
        first = event.step - 1 if self.course.last is None else self.course.first
        is_paused = self._paused_at is not None  # the updates under way still count
        state: JobState = "paused" if is_paused else "training"
        message = self._paused_by if is_paused else ""
        tokens, samples = event.tokens_per_s, event.samples_per_s
        each = None if tokens is None or samples <= 0 else tokens / samples
        self._change(state=state, message=message, last=point, first=first, tokens_per_sample=each)
        if event.step % self.course.stride == 0:
            self._points.append(point)
        if len(self._points) > self._limit:
            stride = 2 * self.course.stride
            self._points = [point for point in self._points if point.step % stride == 0]
            self._change(stride=stride)

    def _trained(self, seconds: float) -> float:
        """So many seconds without a person's pauses."""
        until = seconds if self._paused_at is None else self._paused_at
        return until - self._paused_seconds

    def _with_speeds(self, plan: CoursePlan) -> CoursePlan:
        """A plan that is not a new one says no speeds: they are those of the one before."""
        before = self.course.plan
        if plan.alone_samples_per_s or before is None:
            return plan
        return replace(plan, alone_samples_per_s=before.alone_samples_per_s)

    def _change(self, **fields: object) -> None:
        self.course = replace(self.course, **fields)  # type: ignore[arg-type]


def joined(before: JobCourse | None, answer: JobCourse) -> JobCourse:
    """The whole course, from what was known of it and an answer."""
    if not answer.is_rest or before is None or before.run != answer.run:
        return replace(answer, is_rest=False)
    last = before.points[-1].step if before.points else -1
    new = tuple(point for point in answer.points if point.step > last)
    points = (*before.points, *new)[-2 * POINTS_LIMIT :]
    return replace(answer, points=points, earlier=before.earlier, is_rest=False)


def known_of(course: JobCourse | None) -> CourseAsked:
    """The question of one who has that already."""
    if course is None:
        return CourseAsked()
    return CourseAsked(course.run, course.stride, course.points[-1].step if course.points else 0)


def _plan(event: events.Plan) -> CoursePlan:
    return CoursePlan(
        epoch=event.epoch,
        head=plan_head(event)[:TEXT_LIMIT_CHARACTERS],
        stages=tuple(map(_stage, event.stages[:256])),
        left_out=tuple(
            CourseLeftOut(out.name, out.reason[:TEXT_LIMIT_CHARACTERS])
            for out in event.left_out[:256]
        ),
        predicted_samples_per_s=_finite(event.predicted_samples_per_s),
        micro_batch=event.micro_batch,
        micro_batches=event.micro_batches,
        peak_bytes=dict(list(event.predicted_peak_bytes.items())[:256]),
        host_bytes=dict(list(event.predicted_host_bytes.items())[:256]),
        changes_results=tuple(text[:TEXT_LIMIT_CHARACTERS] for text in event.changes_results[:64]),
        links=tuple(
            CourseLink(link.sender, link.receiver, link.bytes_per_s, link.latency_s)
            for link in event.links[:LINKS_LIMIT]
        ),
        alone_samples_per_s=dict(list(event.alone_samples_per_s.items())[:256]),
    )


def _stage(stage: events.PlanStage) -> CourseStage:
    devices = tuple(CourseShare(device.name, device.share) for device in stage.devices[:256])
    layers = layers_text(stage)[:TEXT_LIMIT_CHARACTERS]
    return CourseStage(stage.units, devices, layers, stage.allocation)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
