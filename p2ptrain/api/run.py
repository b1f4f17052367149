"""A job that is being trained, as apps see it: its events, its result, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, Self

from p2ptrain import events
from p2ptrain.aio.tasks import set_within
from p2ptrain.api import course_sentences, notebook
from p2ptrain.api.event_stream import EventReader, EventStream
from p2ptrain.api.job_course import JobCourse
from p2ptrain.api.job_desk import JobDesk
from p2ptrain.api.progress import INTERVAL_SECONDS, Outcome, ProgressReporter
from p2ptrain.api.sinks import RunSinks, asked_sinks
from p2ptrain.errors import OptionError, RunCancelled, callback_note
from p2ptrain.events import Event
from p2ptrain.holder.rounds.pause import JobPause
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import Mesh

if TYPE_CHECKING:
    import torch

    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions


class Trains(Protocol):
    """Trains a job on whatever computes it."""

    @property
    def waits(self) -> str | None:
        """What the job waits for that is no device."""

    @property
    def limit(self) -> str:
        """What limits it now, in a sentence."""

    @property
    def energy(self) -> str:
        """What it has used of energy, in a sentence."""

    async def train(
        self,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
        folder: StateFolder | None = None,
        *,
        pause: JobPause | None = None,
    ) -> None:
        """From beginning to end."""


class RunEvents:
    """The events of a run, from the first on. The end raises what the job failed with."""

    def __init__(self, task: asyncio.Task[None], reader: EventReader) -> None:
        self._task = task
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            return await anext(self._reader)
        except StopAsyncIteration:
            await _ended(self._task)
            raise

    async def aclose(self) -> None:
        """End the iteration now, as of an async generator (`contextlib.aclosing`)."""
        await self._reader.aclose()


class Run:
    """A job that is being trained: an async iterator of its events.

    Iteration ends with the job; like `result`, it raises what the job failed with. A notebook shows
    it live: write  run  as the last line of a cell.

    Attributes:
        plan: the one in force; None before the first.
    """

    def __init__(
        self,
        job: Job,
        task: asyncio.Task[None],
        stream: EventStream,
        pause: JobPause,
        announce: Callable[[Event], None],
        here: str,
        course: Callable[[], JobCourse],
    ) -> None:
        self.plan: events.Plan | None = None
        self._course = course
        self._job = job
        self._pause = pause
        self._announce = announce
        self._here = here
        self._task = task
        self._stream = stream
        self._own = self.events()
        self._cancelled = False

    def events(self) -> RunEvents:
        """One more iterator of this run's events, from the first on.

        A reader, or a call, that is 10,000 events late misses the oldest.
        """
        return RunEvents(self._task, self._stream.subscribe())

    @property
    def done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._task.done()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._own)

    async def result(self) -> torch.nn.Module:
        """Wait for the end; returns the user's own model with the trained weights.

        Raises:
            UserError, PeerError: why the job failed.
            RunCancelled: it was cancelled.
            asyncio.CancelledError: the task that waits here was; the job continues.
        """
        await _ended(self._task)
        return self._job.users_model

    def pause(self, by: str = "") -> None:
        """Begin no further update; weights and devices are kept. Harmless repeated.

        Args:
            by: name of the device on which a person wants it; this one by default.
        """
        if not self.done and self._pause.begin():
            self._announce(events.Paused(by or self._here))

    def resume(self, by: str = "") -> None:
        """Go on after `pause`, with the next update."""
        if not self.done and self._pause.end():
            self._announce(events.Resumed(by or self._here))

    def stop(self) -> None:
        """Begin to end the training, without waiting: for a button. Else as `cancel`."""
        if not self._cancelled:  # a second time would break off the letting go
            self._cancelled = True
            self._task.cancel()

    def as_html(self, advice: str = notebook.STOP) -> str:
        """As it is now: devices, parts, the curve. `advice`: how to stop it, while it runs."""
        return notebook.course_html(self._course(), advice)

    def __repr__(self) -> str:
        return f"<Run: {course_sentences.headline(self._course())}>"

    def _repr_html_(self) -> str:
        """In notebooks."""
        return self.as_html()

    def _ipython_display_(self) -> None:
        """In a notebook that runs, live."""
        if not notebook.is_here():
            raise NotImplementedError  # IPython shows it as anything else
        notebook.show(self)

    async def cancel(self, by: str = "") -> None:
        """Stop training; the other devices are let go. Harmless after the end, and repeated.

        Args:
            by: name of the device on which a person wants it, where it is another one.
        """
        if not self._cancelled and by not in ("", self._here) and not self.done:
            self._announce(events.Warning(f"stopped on {by}", by))
        self.stop()
        await asyncio.wait([self._task])


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a run; raises what it failed with, and RunCancelled where it was cancelled."""
    await asyncio.wait([task])
    if task.cancelled():
        raise RunCancelled("the training was cancelled")
    task.result()


def asked_options(job: object, options: object, fields: Mapping[str, Any]) -> TrainOptions:
    """How a job is to be trained.

    Args:
        fields: of TrainOptions; instead of `options`.

    Raises:
        OptionError: an app hands over something else than a job and options, or both kinds.
        TypeError: an option that there is not.
    """
    from p2ptrain.job.job import Job
    from p2ptrain.job.train_options import TrainOptions

    if not isinstance(job, Job):
        raise OptionError(f"what is trained must be a p2ptrain.Job, not {type(job).__name__}")
    if not isinstance(options, TrainOptions | None):
        raise OptionError(f"options must be p2ptrain.TrainOptions, not {type(options).__name__}")
    if options is not None and fields:
        raise OptionError(
            f"{', '.join(fields)} beside options: write them into TrainOptions(...), or all as "
            "keywords"
        )
    return options or TrainOptions(**fields)


def _same(job: Job) -> str:
    """What earlier runs must have in common with this one to stand beside it."""
    from torch.nn.parameter import is_lazy

    weights = sum(0 if is_lazy(p) else p.numel() for p in job.model.parameters())
    return f"{type(job.model).__name__[:200]}, {weights} weights"


def start_run(
    mesh: Mesh,
    member: Trains,
    job: Job,
    options: TrainOptions,
    emit: Callable[[Event], None],
    desk: JobDesk,
    folder: StateFolder | None = None,
) -> Run:
    """Train `job` in a task of its own.

    Args:
        emit: takes every event, beside the run itself.
        desk: has the job's course for those who ask, and pauses and stops it for them.
        folder: where the job's journal stands; None = nowhere.
    """
    stream = EventStream(replays=True)
    model = type(job.model).__name__
    reporter = ProgressReporter(mesh, model, lambda: member.waits)
    steps = job.total_steps(options.steps)
    course = desk.begin(model, steps, lambda: member.limit, lambda: member.energy, _same(job))
    sinks = RunSinks(asked_sinks(job, options), lambda event: announce(event))
    notified = asyncio.Event()
    pause = JobPause()

    def announce(event: Event) -> None:
        reporter.note(event)
        course.note(event)
        if isinstance(event, events.Plan):
            begun.plan = event
        notified.set()
        stream.publish(event)
        emit(event)
        sinks.put(event)

    async def report() -> None:
        while True:
            await set_within(notified, INTERVAL_SECONDS)
            notified.clear()
            await reporter.tell(monotonic())  # also where nothing is new

    async def run() -> None:
        reporting = asyncio.create_task(report(), name="report progress")
        outcome: Outcome = "stopped"
        try:
            await member.train(job, options, announce, folder, pause=pause)
            outcome = "done"
        except Exception as error:
            outcome = "failed"
            announce(events.Error(callback_note(error) or str(error) or type(error).__name__))
            raise
        except asyncio.CancelledError:
            sinks.put(events.Stopped())
            raise
        finally:
            reporting.cancel()
            course.end()
            reporter.over(outcome)
            await reporter.tell(monotonic())
            await sinks.close()

    task = asyncio.create_task(run(), name="train")
    task.add_done_callback(lambda _: stream.close())  # also of one that is cancelled before it runs
    begun = Run(job, task, stream, pause, announce, mesh.name, course.whole)
    course.ways = {"pause": begun.pause, "resume": begun.resume, "stop": begun.cancel}
    return begun
