"""What comes before a job's first plan: the capture, the members, and what they keep of it.

journal found ──► its members, 3 s at most ─┐                   ┌─► resumed: its id, history
none ───────────► as many as asked for ─────┼─► captured, asked ┤
                                            │                   └─► new: older jobs are ended
the model is captured meanwhile ────────────┘
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

from p2ptrain import events
from p2ptrain.aio.tasks import run_in_background, set_within, task_scope
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.errors import OptionError, UserError
from p2ptrain.events import Event
from p2ptrain.holder.start import job_registry, journal
from p2ptrain.holder.start.job_registry import job_fingerprint, job_id, job_prefix, weights_digest
from p2ptrain.holder.start.journal import JournalEntry
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import CapturedAgain, PreparedJob
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.planning_files import read_plan
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.logs import get_logger, timed
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import MemberState, Mesh
from p2ptrain.mesh.waiting import membership_changes, wait_within
from p2ptrain.plan.types.plan import Plan
from p2ptrain.recovery.cores.holder_core import START_SECONDS
from p2ptrain.recovery.cores.job_history import ReportedProgress
from p2ptrain.recovery.resume_decision import ResumeMode, decide_resume
from p2ptrain.state import ended_jobs

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StartedJob:
    """A job about to ask for its first, or next, generation.

    Attributes:
        entry: as the journal has it, or is to have it.
        has_first_weights: whether those that the job began with are here.
    """

    prepared: PreparedJob
    entry: JournalEntry
    has_first_weights: bool


class JobStart:
    """Create it as soon as this device is a member, then `run`.

    Args:
        folder: where the journal stands; None = there is none.
        answer_seconds: for a device to say what it keeps of earlier jobs.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: StateFolder | None,
        options: TrainOptions,
        emit: Callable[[Event], None],
        profiler: ClusterProfiler,
        answer_seconds: float,
    ) -> None:
        self._mesh = mesh
        self._profiler = profiler
        self._answer_seconds = answer_seconds
        self._folder = folder
        self._options = options
        self._emit = emit
        self._since = monotonic()
        self._opened: PreparedJob | None = None
        self._is_given_up = False

    async def run(self, job: Job, again: CapturedAgain | None = None) -> StartedJob:
        """Export the model while the household gathers; then it is known which job this is.

        Args:
            again: what it goes on from, where it was captured before.

        Raises:
            UserError: the job, the script's data or the options have to change.
        """
        try:
            return await self._run(job, again)
        except BaseException:
            self._is_given_up = True
            if self._opened is not None:
                await run_in_background(self._opened.close)
            raise

    async def _run(self, job: Job, again: CapturedAgain | None) -> StartedJob:
        found = None if self._folder is None else journal.find_journal(self._folder, self._warn)
        wanted = None if self._options.fresh else found
        with timed(log, "captured_and_gathered"):
            async with task_scope() as group:
                capturing = group.create_task(self._capture(job, again))
                if again is None:  # else as many as are left go on
                    group.create_task(self._gather(wanted))
        prepared, weights = capturing.result()
        mark = job_fingerprint(prepared, self._options)
        if again is None and wanted is not None and mark == wanted.first_fingerprint:
            again = await self._captured_before(wanted)
            await run_in_background(prepared.close)
            prepared, weights = await self._capture(job, again)
            mark = job_fingerprint(prepared, self._options)
            if self._folder is not None and mark != wanted.fingerprint:
                ended_jobs.note_ended(self._folder, {wanted.job})  # as the model was captured again
        going_on = None
        if not self._options.dry_run:
            has_state = again is not None and again.checkpoint is not None
            captured_step = prepared.first_step if has_state else None
            going_on = await self._decide(mark, weights, found, captured_step)
        if going_on is not None:
            log.info("job_goes_on", job=going_on.job, step=going_on.reported.step)
            same = weights == going_on.weights
            prepared = replace(prepared, first_step=going_on.first_step)
            prepared.job.numbers.begin(going_on.measured)
            if prepared.loss_scale is not None:
                prepared.loss_scale.begin(going_on.first_step, going_on.scales)
            return StartedJob(prepared, going_on, same)
        if again is not None and again.checkpoint is not None:
            await self._survey_links()
        else:
            if self._folder is not None:
                journal.forget_journal(self._folder)
            if wanted is not None:
                await self._gather(None)
        first = prepared.first_step
        reported = ReportedProgress(first, prepared.evaluated)
        entry = JournalEntry.new(job_id(mark, secrets.token_hex(8)), mark, weights, first, reported)
        if again is not None:
            entry = replace(
                entry,
                next_generation=again.next_generation,
                measured=prepared.job.numbers.measured,
                sizes=again.sizes,
                first_fingerprint=again.first_fingerprint,
            )
        if prepared.loss_scale is not None:
            entry = replace(entry, scales=prepared.loss_scale.rows)
        return StartedJob(prepared, entry, has_first_weights=True)

    def _warn(self, message: str) -> None:
        self._emit(events.Warning(message))

    async def _capture(self, job: Job, again: CapturedAgain | None) -> tuple[PreparedJob, str]:
        def capture() -> PreparedJob:
            self._opened = opened = prepare(job, self._options, again)
            if self._is_given_up:
                opened.close()
            return opened

        prepared = await run_in_background(capture)
        if self._folder is None:
            return prepared, ""
        with timed(log, "first_weights_digested"):
            return prepared, await run_in_background(lambda: weights_digest(prepared.state))

    async def _captured_before(self, wanted: JournalEntry) -> CapturedAgain:
        """What an earlier process had its model captured again for, and the state that it had."""
        assert self._folder is not None
        loading = partial(journal.captured_state, self._folder, self._warn)
        state, number = await run_in_background(loading), wanted.next_generation
        return CapturedAgain(wanted.sizes, wanted.first_fingerprint, state, next_generation=number)

    async def _gather(self, found: JournalEntry | None) -> None:
        """Those that had a part in the job found; without one, as many as are asked for."""
        if self._options.local:
            return
        if found is not None:
            others, until = self._others(found), self._since + START_SECONDS
            await job_registry.wait_for_devices(self._mesh, others, max(until - monotonic(), 0.0))
            if not others:  # a device may have fetched all of it for a plan that never began
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(until - monotonic(), 0.0)):
                        await wait_until_stable(self._mesh)
            return
        with timed(log, "members_gathered"):
            await wait_for_members(
                self._mesh, self._options.wait_for, self._options.wait_timeout_seconds
            )
            if self._options.wait_for == 1:
                await wait_until_stable(self._mesh)
        await self._survey_links()

    async def _survey_links(self) -> None:
        if self._options.local:
            return
        with timed(log, "links_surveyed"):
            me, members = self._mesh.self_id, self._mesh.members.values()  # this one exports still
            alive = (m for m in members if m.state is MemberState.ALIVE and m.id != me)
            here = sorted(m.id for m in alive if not m.rests)
            await self._profiler.measure_links(here)

    def _others(self, found: JournalEntry) -> frozenset[str]:
        placed = found.noted.placed
        return frozenset(placed.places() if placed else ()) - {self._mesh.self_id}

    async def _decide(
        self, mark: str, weights: str, found: JournalEntry | None, captured_step: int | None
    ) -> JournalEntry | None:
        """The job to go on with, if there is one; others of this device's are over then."""
        is_newer = (  # its state was saved, and it was killed before its record was
            found is not None and captured_step is not None and captured_step > found.first_step
        )
        kept = {}
        if not self._options.local:
            kept = await job_registry.ask_unfinished_jobs(self._mesh, self._answer_seconds)
        verdict = decide_resume(
            job_prefix(mark),
            None if found is None else (found.job, found.fingerprint == mark),
            () if found is None else self._others(found),
            kept,
            fresh=self._options.fresh,
            begun=found is not None and not is_newer and found.got_somewhere(weights),
            over=() if self._folder is None else ended_jobs.find_ended(self._folder),
            captured_step=captured_step,
        )
        if verdict.start is ResumeMode.REFUSE:
            raise OptionError(verdict.reason)
        if verdict.reason:
            self._emit(events.Warning(verdict.reason))
        if verdict.ending:
            if self._folder is not None:
                ended_jobs.note_ended(self._folder, verdict.ending)
            await job_registry.end_earlier_jobs(self._mesh, verdict.ending, self._answer_seconds)
        return found if verdict.start is ResumeMode.GO_ON else None


SETTLE_SECONDS = 1.5


async def wait_for_members(mesh: Mesh, count: int, timeout_seconds: float | None) -> None:
    """Wait until `count` devices are alive, this one included.

    Raises:
        UserError: not within `timeout_seconds`.
    """
    if not await wait_within(mesh, lambda: len(_alive(mesh)) >= count, timeout_seconds):
        names = sorted(_alive(mesh))
        here = f"{len(names)} {'is' if len(names) == 1 else 'are'} here ({', '.join(names)})"
        raise UserError(
            f"waited {timeout_seconds:g} s for {count} devices, but only {here}; start "
            "`p2ptrain join` on the others, or see why they are not found with `p2ptrain doctor`"
        )


async def wait_until_stable(mesh: Mesh) -> None:
    """Wait until the membership has not changed for a while."""
    with membership_changes(mesh, described=False) as changed:
        while await set_within(changed, SETTLE_SECONDS):
            changed.clear()


def _alive(mesh: Mesh) -> list[str]:
    """Those that can take part."""
    return [
        m.name
        for m in mesh.members.values()
        if m.state is MemberState.ALIVE and (m.id == mesh.self_id or not m.rests)
    ]


def given_plan(path: Path | None, job: Job, how: AsyncOptions | None) -> tuple[Plan | None, Job]:
    """The plan in that file, and `job` with its micro-batches where the job names none.

    Raises:
        OptionError: it is no plan, or has other micro-batches than the job.
    """
    if path is None:
        return None, job
    plan = read_plan(path, job.batch_size)
    if how is not None:
        return plan, job
    size = job.fixed_micro_batch
    if size and size != plan.micro_batch:
        raise OptionError(
            f"{path}: the plan has micro-batches of {plan.micro_batch} samples, and the job of "
            f"{size}: plan with --micro-batch {size}, or leave micro_batch out of the job"
        )
    return plan, replace(job, micro_batch=plan.micro_batch)
