"""The household's job on every member: the holder keeps its course, the others ask the holder.

    any member ── course, explain, rounds ──► the holder, which answers
               ── job.steer (run, action) ──► the holder, which does it and says who asked

A member asks for the course only while a page is open, once for all pages, and for what is new. The
course of this device's own last job stays in its state folder, for after the `train` that made it.
Members are equals: one that may remove another may pause its training too.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Any, Literal, TypeAlias, TypeVar

from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.api.job_course import (
    ENDED,
    REPORTED,
    CourseAsked,
    CourseKeeper,
    CoursePoint,
    EarlierRuns,
    JobCourse,
    JobState,
    joined,
    known_of,
)
from p2ptrain.api.progress import JobLine, ProgressBoard
from p2ptrain.errors import Error, PeerError, UserError
from p2ptrain.events import Done, Event
from p2ptrain.job.last_job import last_facts
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import GONE, Mesh, display_name
from p2ptrain.messages.kinds import EXPLAIN, ROUND_PICTURE
from p2ptrain.net.fields import Blob, FrameFields, limited, part_of
from p2ptrain.net.forms import Id
from p2ptrain.net.message import Message, Priority
from p2ptrain.plan.explain import explained
from p2ptrain.plan.round_picture import RoundPicture
from p2ptrain.plan.types.job_facts import JobFacts

log = get_logger(__name__)

B = TypeVar("B", bound=Blob)

COURSE, STEER = "job.course", "job.steer"

COURSE_FILE = "course.json"

EARLIER_FILE = "earlier_runs.json"

ANSWER_SECONDS = 5.0

EXPLAIN_SECONDS = 60.0
"""Rounds are watched, and plans searched."""

ROUNDS_SECONDS = 10.0

Action: TypeAlias = Literal["pause", "resume", "stop"]

Ways: TypeAlias = Mapping[Action, Callable[[str], Coroutine[Any, Any, None] | None]]
"""What does each, with the name of the device that asks."""


@dataclass(frozen=True, slots=True)
class SteerRequest(FrameFields):
    """Of a job that the asked device holds; `run` as in its course."""

    run: Id
    action: Action


class CourseRecorder:
    """The course of a job of this device, with the clock and the file."""

    def __init__(
        self,
        keeper: CourseKeeper,
        folder: StateFolder | None,
        limit: Callable[[], str],
        energy: Callable[[], str],
        same: str,
    ) -> None:
        """`same`: of which model earlier runs are kept."""
        self.ways: Ways = {}
        self._keeper = keeper
        self._same = same
        self._limit = limit
        self._energy = energy
        self._used = ""  # when it was done
        self._folder = folder
        self._began_at = monotonic()
        self._ended_at: float | None = None

    @property
    def run(self) -> str:
        """Which course this is."""
        return self._keeper.course.run

    @property
    def is_over(self) -> bool:
        """The job has ended."""
        return self._ended_at is not None

    def note(self, event: Event) -> None:
        """An event of the job."""
        self._keeper.note(event, self._seconds())
        if isinstance(event, Done):
            self._used = self._energy()

    def end(self) -> None:
        """The job has ended. The course is written down; where that fails the job is no worse."""
        self._keeper.stopped()
        self._ended_at = monotonic()
        if self._folder is not None:
            try:
                course = self.whole()
                self._folder.write_form(COURSE_FILE, course)
                runs = _earlier(self._folder).with_run(self._same, course, round(time()))
                self._folder.write_form(EARLIER_FILE, runs)
            except UserError as error:
                log.warning("course_not_written", why=str(error))

    def whole(self) -> JobCourse:
        """All of it."""
        return self.since(CourseAsked())

    def since(self, asked: CourseAsked) -> JobCourse:
        """What is new for a device that has what `asked` says."""
        energy = self._energy() or self._used
        return self._keeper.since(asked, self._seconds(), self._limit(), energy)

    def _seconds(self) -> float:
        return (self._ended_at or monotonic()) - self._began_at


class JobDesk:
    """One a member.

    Attributes:
        board: what the holder reports unasked.
    """

    def __init__(self, mesh: Mesh, folder: StateFolder | None) -> None:
        """`folder`: this device's state; None: nothing of its jobs is kept."""
        self._mesh = mesh
        self.board = ProgressBoard(mesh)
        self._folder = folder
        self._own: CourseRecorder | None = None
        self._known: JobCourse | None = None  # of another device's job
        self._known_of: str | None = None  # that device
        self._earlier: JobCourse | None = None  # from the file
        self._has_looked = False
        self._tasks = TaskOwner(_failed)
        mesh.route(COURSE, self._answer)
        mesh.route(STEER, self._steered)

    async def close(self) -> None:
        """Begin nothing more; a run that is being stopped is its owner's."""
        await self._tasks.cancel()

    def begin(
        self,
        model: str,
        steps: int | None,
        limit: Callable[[], str] = str,
        energy: Callable[[], str] = str,
        same: str = "",
    ) -> CourseRecorder:
        """This device begins to train a job of so many steps, if that is known.

        Args:
            limit: what limits it now, in a sentence.
            energy: what it has used so far, in a sentence.
            same: says which model it is, more closely than its name.
        """
        same = same or model
        earlier = () if self._folder is None else _earlier(self._folder).of(same)
        run = secrets.token_hex(8)
        keeper = CourseKeeper(run, self._mesh.name, model, steps, earlier=earlier)
        self._own = CourseRecorder(keeper, self._folder, limit, energy, same)
        return self._own

    async def read(self) -> JobCourse | None:
        """The course of the job that runs, else of the last one that this device knows of."""
        holder = self.board.holder
        if self._own is not None and not self._own.is_over:
            return self._own.whole()
        if holder is not None and holder != self._mesh.self_id:
            await self._ask(holder)
            return self._known if holder == self._known_of else self._as_reported(holder)
        if self._known is not None:
            return self._after_its_end(self._known)
        return self._own.whole() if self._own is not None else self._last_here()

    async def steer(self, run: str, action: Action) -> None:
        """Pause, resume or stop a training, wherever its data is; `run` as in its course.

        Raises:
            UserError, PeerError: that training has ended, or its device does not answer.
        """
        asked, holder = SteerRequest(run, action), self._holder_of(run)
        if holder is None:
            raise UserError("another training runs now, or none: look again")
        if holder == self._mesh.self_id:
            self._do(asked, self._mesh.name)
        else:
            await self._call(holder, Message(STEER, asked.fields()), ANSWER_SECONDS)

    async def explain(self) -> dict[str, Any]:
        """See `Node.explain`."""
        holder = self.board.holder
        if holder is None:
            return await explained_last(None if self._folder is None else self._folder.path)
        return explained(await self._part(holder, EXPLAIN, JobFacts, EXPLAIN_SECONDS))

    async def rounds(self) -> RoundPicture | None:
        """See `Node.rounds`."""
        holder = self.board.holder
        if holder is None:
            return None
        return await self._part(holder, ROUND_PICTURE, RoundPicture, ROUNDS_SECONDS, Priority.BULK)

    async def _part(
        self,
        holder: str,
        kind: str,
        form: type[B],
        seconds: float,
        priority: Priority = Priority.CONTROL,
    ) -> B:
        reply = await self._call(holder, Message(kind), seconds, priority, form)
        return form.from_bytes(part_of(reply))

    async def _call(
        self,
        holder: str,
        question: Message,
        seconds: float,
        priority: Priority = Priority.CONTROL,
        form: type[Blob] | None = None,
    ) -> Message:
        """What the job's holder answers, with a part of that form. Raises PeerError: nothing."""
        parts = None if form is None else limited(form.LIMIT.most_bytes)
        try:
            return await self._mesh.call(
                holder, question, timeout_seconds=seconds, priority=priority, reply_parts=parts
            )
        except TimeoutError as error:
            raise PeerError(f"{display_name(self._mesh, holder)} does not answer") from error

    def _holder_of(self, run: str) -> str | None:
        """The device that trains that run, as far as this one knows; None where none does now."""
        if self._own is not None and self._own.run == run and not self._own.is_over:
            return self._mesh.self_id
        known = self._known
        return self._known_of if known is not None and known.run == run else None

    async def _ask(self, holder: str) -> None:
        """Where no answer comes, what is known stays as it is."""
        known = self._known if holder == self._known_of else None
        question = Message(COURSE, known_of(known).fields())
        with suppress(Error):
            reply = await self._call(holder, question, ANSWER_SECONDS, Priority.BULK, JobCourse)
            answer = JobCourse.from_bytes(part_of(reply))
            self._known, self._known_of = joined(known, answer), holder

    def _as_reported(self, holder: str) -> JobCourse:
        """What the holder's progress says, where it gives no course (an older p2ptrain)."""
        line = self.board.line or {}
        step, last = line.get("step"), None
        if step is not None:
            last = CoursePoint(step, 0.0, line.get("loss"), line.get("samples_per_s"), None)
        name = display_name(self._mesh, holder)
        state: JobState = "starting" if last is None else "training"
        return JobCourse(
            f"{REPORTED}{name}", name, line.get("model") or "a model", state, last=last
        )

    def _after_its_end(self, known: JobCourse) -> JobCourse:
        """Of a job of another device that is not reported any more."""
        holder = self._known_of or ""
        line = self.board.ended.get(holder)
        if known.state not in ENDED and line is not None:
            self._known = replace(_ended_by(known, line), limit="")
            return self._known
        member = self._mesh.members.get(holder)
        if known.state not in ENDED and (member is None or member.state in GONE):
            return replace(known, state="waiting", message=known.holder, limit="")
        return known

    def _last_here(self) -> JobCourse | None:
        if not self._has_looked and self._folder is not None:
            self._has_looked = True
            try:
                self._earlier = self._folder.read_form(COURSE_FILE, JobCourse)
            except UserError as error:
                log.warning("course_not_read", why=str(error))
        return self._earlier

    async def _answer(self, peer: str, message: Message) -> Message:
        if self._own is None:
            raise PeerError(f"{self._mesh.name} trains no job of its own")
        asked = CourseAsked.read(message.fields)
        return Message(COURSE, {}, (self._own.since(asked).to_part(),))

    async def _steered(self, peer: str, message: Message) -> Message:
        try:
            self._do(SteerRequest.read(message.fields), display_name(self._mesh, peer))
        except UserError as error:
            raise PeerError(str(error)) from error
        return Message(STEER, {})

    def _do(self, asked: SteerRequest, by: str) -> None:
        own = self._own
        if own is None or own.run != asked.run or own.is_over:
            raise UserError(f"that training has ended on {self._mesh.name}: look again")
        log.info("job_steered", action=asked.action, by=by)
        doing = own.ways[asked.action](by)
        if doing is not None:  # in a task: stopping takes as long as the devices' letting go
            self._tasks.spawn(doing, f"{asked.action} the job")


async def explained_last(state_dir: Path | None) -> dict[str, Any]:
    """What limited this device's last training. Raises UserError: there was none."""
    facts = None
    if state_dir is not None:
        facts = await run_in_background(lambda: last_facts(state_dir))
    if facts is None:
        raise UserError("nothing trains now, and this device has held no training before")
    return explained(facts)


def _failed(name: str, error: BaseException) -> None:
    log.warning("not_steered", task=name, why=str(error) or type(error).__name__)


def _earlier(folder: StateFolder) -> EarlierRuns:
    """What is kept of runs before; nothing where it cannot be read."""
    try:
        return folder.read_form(EARLIER_FILE, EarlierRuns) or EarlierRuns()
    except UserError as error:
        log.warning("earlier_runs_not_read", why=str(error))
        return EarlierRuns()


def _ended_by(known: JobCourse, line: JobLine) -> JobCourse:
    """As the holder's last line says: the answers before it were some steps behind."""
    last = known.last
    if last is not None and line.step is not None and line.step > last.step:
        loss, speed = line.loss, line.samples_per_s
        last = replace(last, step=line.step, loss=loss, samples_per_s=speed)
    return replace(known, state=line.outcome or "done", message="", last=last, limit="")
