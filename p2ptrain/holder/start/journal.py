"""What a holder writes down, so that a later process can resume its job.

    job.json    at every generation: the job, the plan, the history. Replaced whole, synced.
    reported    at every step: what the user has seen. Overwritten in place, synced once a second.
    captured    where the model is captured again: the state that the job goes on from, a checkpoint

A killed process leaves both as its last call wrote them. A power cut may lose the last second of
`reported`: then a step is reported twice. If something cannot be written the journal is deleted,
because an old one would repeat generation numbers and reports. It is written again once the disk
accepts it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Annotated, Any, Literal, TypeAlias

from p2ptrain.aio.tasks import to_the_end
from p2ptrain.errors import OptionError, ProtocolError, TrainingError, UserError
from p2ptrain.holder.input.batch_layout import SampleSizes
from p2ptrain.job.update_numbers import Measured
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import BrokenFile, StateFolder
from p2ptrain.messages.assign import PlanInForce
from p2ptrain.messages.assignment import FIRST, Assignment
from p2ptrain.net.forms import By, Count, Id, Local, Positive, Rare
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.cores.job_history import NotedHistory as Noted
from p2ptrain.recovery.cores.job_history import ReportedProgress
from p2ptrain.recovery.loss_scale import ScaleRows
from p2ptrain.recovery.version import LineageRows, Version, VersionRow
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checkpoint_files import Checkpoint
from p2ptrain.state.ended_jobs import note_ended

log = get_logger(__name__)

JOB_FILE = "job.json"

REPORTED_FILE = "reported"

CAPTURED_FOLDER = "captured"

SYNC_SECONDS = 1.0

RETRY_SECONDS = 10.0
"""Between two tries to write again, where that failed."""

FIRST_GENERATION = 1

_Metric: TypeAlias = Annotated[float, By(float.fromhex, float.hex, str)]

_NOTHING = ReportedProgress(-1)

_BINARY = getattr(os, "O_BINARY", 0)

_REPORTED = struct.Struct("<qqQ")
"""Step, evaluated, CRC-32 of both: 24 bytes, which one write puts down."""


def _read_assignment(value: object) -> Assignment:
    blob = base64.b64decode(value if isinstance(value, str) else "?", validate=True)
    return Assignment.from_bytes(blob)


def _write_assignment(assignment: Assignment) -> str:
    return base64.b64encode(assignment.to_bytes()).decode()


def _by_device(took_part: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(took_part.items()))


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An unfinished job; all but `reported` is what `JOB_FILE` holds.

    Attributes:
        job: its id.
        fingerprint: see `fingerprint`.
        weights: digest of what it began with, see `weights_digest`.
        first_step: updates that those weights had behind them.
        next_generation: first generation number that was never used.
        lineage: of the job.
        assignment, plan: those that it runs by; None before the first.
        stable: newest version of which every copy was acknowledged.
        took_part: devices that had a part, each with its last generation.
        measured: what a scheduler has seen of evaluations.
        stopped: updates with which a callback has ended it; None = none has.
        scales: of the loss, as `LossScale` notes them.
        sizes: of batches that came late, for which the model was captured again: of each sample.
        first_fingerprint: from before that; "" where it was not.
        reported: what the user has seen.
    """

    format: Literal["p2ptrain.job/2"]
    job: Id
    fingerprint: Id
    weights: Id
    first_step: Count
    next_generation: Positive
    lineage: LineageRows
    assignment: Annotated[Assignment, By(_read_assignment, _write_assignment)] | None
    plan: Mapping[str, Any] | None
    stable: VersionRow | None
    took_part: Annotated[tuple[tuple[str, int], ...], By(_by_device, dict, Mapping[str, Count])]
    measured: Annotated[tuple[tuple[Count, _Metric], ...], Rare()] = ()
    stopped: Count | None = None
    scales: Annotated[tuple[tuple[Count, float], ...], Rare()] = ()
    sizes: Annotated[tuple[tuple[tuple[Count, ...], ...], ...], Rare()] = ()
    first_fingerprint: Annotated[str, Rare()] = ""
    reported: Annotated[ReportedProgress, Local()] = _NOTHING

    @classmethod
    def new(
        cls, job: str, fingerprint: str, weights: str, first_step: int, reported: ReportedProgress
    ) -> JournalEntry:
        """Before its first plan."""
        return cls(
            *("p2ptrain.job/2", job, fingerprint, weights, first_step, FIRST_GENERATION, FIRST),
            assignment=None,
            plan=None,
            stable=None,
            took_part=(),
            reported=reported,
        )

    @property
    def in_force(self) -> PlanInForce | None:
        """The plan that it runs by; None before the first. Raises OptionError: it is none."""
        if self.assignment is None or self.plan is None:
            return None
        size = self.assignment.batch_size
        plan = Plan.from_json(self.plan, "the plan in force", batch_size=size)
        return PlanInForce(self.assignment, plan)

    def got_somewhere(self, weights: str) -> bool:
        """Whether anything would be lost by starting again from the weights of that digest.

        Nothing is before the first plan; nor, where the process that begins now has drawn other
        weights, before a step was reported: what this device had itself may be nowhere else yet.
        One whose model was captured again has made steps before.
        """
        is_reported = bool(self.sizes) or self.reported.step > self.first_step
        return self.plan is not None and (is_reported or weights == self.weights)

    @property
    def noted(self) -> Noted:
        """As the rules wrote it down."""
        placed = None if self.assignment is None else self.assignment.placed
        return Noted(self.next_generation, self.lineage, placed, self.stable, self.took_part)


class Journal:
    """One job's journal, while it is trained.

    Args:
        folder: where it stands; None = nowhere, for a job that is never resumed.
        entry: the job, new or found.
        warn: warns the user that nothing can be written, once, and once it can be again.
        sync_seconds: between two syncs.
        retry_seconds: between two tries to write again, where that failed.

    Attributes:
        noted: what it says; None = a new job.
        in_force: the plan that the job runs by, or an earlier process left; None before the first.
    """

    def __init__(
        self,
        folder: StateFolder | None,
        entry: JournalEntry,
        warn: Callable[[str], None],
        *,
        sync_seconds: float = SYNC_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        # numbers that were reserved for a first plan which never came are used up too
        is_new = entry.plan is None and entry.next_generation == FIRST_GENERATION
        self.noted = None if is_new else entry.noted
        self.in_force = entry.in_force
        self._folder = folder
        self._entry = entry
        self._warn = warn
        self._sync_seconds, self._retry_seconds = sync_seconds, retry_seconds
        self._descriptor: int | None = None
        self._is_synced = True
        self._failed_at: float | None = None  # when writing was last tried in vain; None: it works
        self._late: JournalEntry | None = None  # to be written with the next sync
        self._writing = threading.Lock()

    def write_down(
        self, noted: Noted, newest: PlanInForce | None
    ) -> Coroutine[Any, Any, None] | None:
        """Put down what the rules say; returns what must have ended before it is announced.

        Args:
            newest: the plan made ready last, which may be what they accept.
        """
        old, self.noted = self.noted, noted
        if old is not None and replace(old, stable=noted.stable) == noted:
            if noted.stable is not None:
                self.stable(noted.stable)
            return None
        generation = 0 if noted.placed is None else noted.placed.generation
        if newest is not None and newest.assignment.key.generation == generation:
            self.in_force = newest
        return None if self._folder is None else self.begun(noted, self.in_force)

    async def begun(self, noted: Noted, in_force: PlanInForce | None) -> None:
        """Write down what the rules say, in a thread; nothing of it is announced before.

        A disk takes milliseconds to seconds, and this device's links must not stand still for it.
        """
        self._entry = replace(
            self._entry,
            next_generation=noted.next_generation,
            lineage=noted.lineage,
            assignment=None if in_force is None else in_force.assignment,
            plan=None if in_force is None else in_force.plan.to_json(),
            stable=noted.stable,
            took_part=noted.took_part,
        )
        self._late = None
        await self._write_whole()

    async def _write_whole(self) -> None:
        try:
            await asyncio.to_thread(self._put_down)
        except (OSError, UserError) as error:
            self._give_up(error)
            return
        was_broken = self._failed_at is not None
        if was_broken:
            self._failed_at = None
            self.committed(self._entry.reported)  # it may have been written before a step since
        if was_broken and self._failed_at is None:
            self._warn("the training's record can be written again")

    async def measured(self, measured: Measured) -> None:
        """Write down, in a thread, what a scheduler has seen of evaluations; it decides on rates.

        An evaluation that was reported is not made again, so this comes before.
        """
        self._entry = replace(self._entry, measured=measured)
        await self._write_now()

    async def scaled(self, scales: ScaleRows) -> None:
        """The same for a change of the loss scale; before the update that it comes from counts."""
        self._entry = replace(self._entry, scales=scales)
        await self._write_now()

    async def stopped(self, step: int) -> None:
        """The same for the end that a callback has set: the weights are still on their way."""
        if self._entry.stopped is None:
            self._entry = replace(self._entry, stopped=step)
            await self._write_now()

    async def captured_again(
        self, sizes: tuple[SampleSizes, ...], first_fingerprint: str, point: Checkpoint
    ) -> None:
        """This job ends, and the same with a model captured for `sizes` goes on from `point`.

        A process that starts from now on does that, until the new job has a journal. Until the
        state is on the disk whole, nothing here names the sizes: other writes may come in between.
        """
        if self._folder is None or self._failed_at is not None:
            return
        place = self._folder.path / CAPTURED_FOLDER
        try:
            await to_the_end(partial(checkpoint_files.save, place, point))
        except TrainingError as error:
            self._late = None
            self._close()  # what this job still notes begins another file
            self._warn(
                f"{error.__cause__ or error}: if p2ptrain stops on this device soon, "
                "training cannot be continued"
            )
            forget_journal(self._folder)
            return
        self._entry = replace(self._entry, sizes=sizes, first_fingerprint=first_fingerprint)
        await self._write_whole()

    async def _write_now(self) -> None:
        if self._folder is not None and self._failed_at is None:
            await self._write_whole()

    def stable(self, version: Version) -> None:
        """The same for a version that is now safe; within a second, off the event loop."""
        self._entry = self._late = replace(self._entry, stable=version)

    def committed(self, reported: ReportedProgress) -> None:
        """Write down what is about to be reported."""
        self._entry = replace(self._entry, reported=reported)
        if self._descriptor is None:
            return
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)  # os.pwrite is not everywhere
            os.write(self._descriptor, reported_bytes(reported))
            self._is_synced = False
        except OSError as error:
            self._give_up(error)

    async def keep_synced(self) -> None:
        """Once a second, in a thread: what was written reaches the disk. Until it is cancelled."""
        while True:
            await asyncio.sleep(self._sync_seconds)
            failed_at = self._failed_at
            if failed_at is not None and monotonic() - failed_at >= self._retry_seconds:
                await self._write_whole()
            late, self._late = self._late, None
            if self._folder is None or (late is None and self._is_synced):
                continue
            self._is_synced = True
            try:
                await asyncio.to_thread(self._sync, late)
            except (OSError, UserError) as error:
                self._give_up(error)

    def done(self, *, goes_on: bool = False) -> None:
        """The job is over: there is nothing to resume, and workers that keep it may be notified.

        Args:
            goes_on: as another job, by what `captured_again` has written down.
        """
        if self._folder is not None:
            note_ended(self._folder, {self._entry.job})
        folder, self._folder = self._folder, None
        self._close()
        if folder is not None and not goes_on:
            forget_journal(folder)

    def _put_down(self) -> None:
        with self._writing:
            folder, entry = self._folder, self._entry
            if folder is None:
                return
            if self._descriptor is None:
                folder.write(REPORTED_FILE, reported_bytes(entry.reported))
                self._descriptor = os.open(folder.path / REPORTED_FILE, os.O_WRONLY | _BINARY)
            folder.write_form(JOB_FILE, entry)

    def _sync(self, late: JournalEntry | None) -> None:
        with self._writing:  # `done` or a new generation comes before or after
            descriptor, folder = self._descriptor, self._folder
            if descriptor is None or folder is None:
                return
            os.fsync(descriptor)
            if (
                late is not None and late.next_generation == self._entry.next_generation
            ):  # of this generation
                folder.write_form(JOB_FILE, late)

    def _give_up(self, error: Exception) -> None:
        if self._folder is None:
            return
        is_news, self._failed_at = self._failed_at is None, monotonic()
        if is_news:
            self._warn(
                f"the training's record cannot be written ({error}): training continues, but could "
                "not be continued if p2ptrain stopped on this device"
            )
        self._close()
        _remove_record(self._folder)  # not the captured state: the record may be written again

    def _close(self) -> None:
        with self._writing:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)


def find_journal(folder: StateFolder, warn: Callable[[str], None]) -> JournalEntry | None:
    """The unfinished job of this folder, if there is one that can be read; damage is reported."""
    try:
        entry = folder.read_form(JOB_FILE, JournalEntry)
        if entry is None:
            return None
        if (entry.assignment is None) is not (entry.plan is None):
            raise ProtocolError("a plan in force is an assignment and a plan")
        _ = entry.in_force
        return replace(entry, reported=read_reported(folder.read(REPORTED_FILE)))
    except (UserError, ProtocolError) as error:
        why = error.why if isinstance(error, BrokenFile) else str(error)
        warn(
            f"{folder.path / JOB_FILE} cannot be used ({why}): that unfinished training cannot be "
            "continued"
        )
        return None


def forget_journal(folder: StateFolder) -> None:
    """Remove the journal; a disk that refuses even that is only logged."""
    _remove_record(folder)
    shutil.rmtree(folder.path / CAPTURED_FOLDER, ignore_errors=True)


def _remove_record(folder: StateFolder) -> None:
    for name in (JOB_FILE, REPORTED_FILE):  # without the first one, the second means nothing
        try:
            folder.remove(name)
        except OSError as error:
            log.warning("journal_not_removed", why=str(error))


def captured_state(folder: StateFolder, warn: Callable[[str], None]) -> Checkpoint | None:
    """What a job began with whose model was captured again; None: nothing is there, or whole."""
    place = folder.path / CAPTURED_FOLDER
    try:
        return checkpoint_files.load(place, warn) if place.exists() else None
    except OptionError as error:
        warn(str(error))
        return None


def reported_bytes(reported: ReportedProgress) -> bytes:
    """As the file has it, with a checksum."""
    numbers = struct.pack("<qq", reported.step, reported.evaluated)
    return numbers + struct.pack("<Q", zlib.crc32(numbers))


def read_reported(content: bytes | None) -> ReportedProgress:
    """Raises ProtocolError: it was not written whole."""
    if content is None or len(content) != _REPORTED.size:
        raise ProtocolError("the progress reported was not written whole")
    step, evaluated, check = _REPORTED.unpack(content)
    if check != zlib.crc32(content[:16]):
        raise ProtocolError("the progress reported was not written whole")
    return ReportedProgress(step, evaluated)
