"""Trains one job from beginning to end, on the device that holds the data.

capture, wait for members ──► generations (`driver`), each with its rounds ──► fetch weights
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path
from time import monotonic

from torch import Tensor

from p2ptrain import events, failpoints
from p2ptrain.aio.tasks import TaskOwner, run_in_background
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.errors import (
    PlanError,
    ProtocolError,
    ScriptError,
    TrainingError,
    UserError,
    note_callback,
    size_text,
)
from p2ptrain.events import Done, Event, LeftOut, PlanLink, Stopped
from p2ptrain.holder.driver import JobDriver
from p2ptrain.holder.energy_counter import EnergyCounter, with_energy
from p2ptrain.holder.fact_gatherer import WATCHED, FactGatherer
from p2ptrain.holder.input import loader_memory
from p2ptrain.holder.input.batch_layout import NewSize
from p2ptrain.holder.input.feeder import ReplayFeed
from p2ptrain.holder.input.metrics import missing_loss
from p2ptrain.holder.planning.reconfiguration import ReconfigureReply, plan_only
from p2ptrain.holder.reports import JobReports, plan_event, rate
from p2ptrain.holder.rounds.callback_runner import CallbackFailed, CallbackRunner
from p2ptrain.holder.rounds.generation import HolderGeneration, SentWrong
from p2ptrain.holder.rounds.generation_runner import GenerationWork
from p2ptrain.holder.rounds.pause import JobPause
from p2ptrain.holder.rounds.spoiled_update import Spoiled, SpoiledUpdates, judged, noted
from p2ptrain.holder.rounds.trained_weights import TrainedWeights
from p2ptrain.holder.rounds.training_loop import StoppedEarly, TrainingLoop
from p2ptrain.holder.snapshots.checkpointer import Checkpointer, CheckpointSchedule
from p2ptrain.holder.snapshots.full_snapshots import MAX_AT_ONCE, CheckpointSnapshots, FullSnapshots
from p2ptrain.holder.start import job_registry
from p2ptrain.holder.start.job_start import JobStart, StartedJob, given_plan
from p2ptrain.holder.start.journal import Journal, JournalEntry, forget_journal
from p2ptrain.holder.start.prepared_job import CapturedAgain, PreparedJob
from p2ptrain.holder.trace.span_collector import CollectorSettings, SpanCollector, traced
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import LENGTHS_ROOM, RoundSequence
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.job.user_code import READING, doings
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import display_name
from p2ptrain.messages.job_requests import ModelRequest
from p2ptrain.messages.kinds import FETCH_MODEL
from p2ptrain.net.message import Message, PartKind
from p2ptrain.plan.explain import energy_words, limit_words
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.process.compute_thread import as_other_threads
from p2ptrain.process.memory_budget import usable_memory_bytes
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.runtime.not_finite import MicroBatchNotFinite
from p2ptrain.runtime.stage_sender import tied_changes
from p2ptrain.state.checkpoint_files import Checkpoint
from p2ptrain.state.fetch import state_check
from p2ptrain.state.snapshot_store import StoredTensors
from p2ptrain.state.transfer_client import Known
from p2ptrain.state.transfer_server import STAGE, version_source

INTERRUPT_SECONDS = 30.0
"""For the rounds under way and the weights' way home, after an interrupt."""

WAITED_SECONDS = 3.0
"""For a read or a callback, until it is said to others."""


class _OtherSizes(Exception):  # it is no error
    """The model is to be captured again: a size differs that did not so far.

    Args:
        what: differs.
        point: the job's state before that.
        again: what it goes on with.
    """

    def __init__(self, what: str, point: Checkpoint, again: CapturedAgain) -> None:
        super().__init__("its model is captured for other sizes")
        self.what, self.point, self.again = what, point, again


class JobTrainer:
    """Trains one job. Create it, then `run` once."""

    def __init__(
        self,
        device: LocalDevice,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
        folder: StateFolder | None = None,
        settings: RecoverySettings = HOME,
        pause: JobPause | None = None,
    ) -> None:
        """`folder`: where the job's journal stands; None = this job ends with its process."""
        self._settings = settings
        self._pause = pause or JobPause()
        self._device = device
        self._mesh = mesh = device.mesh
        self._given, self._job = given_plan(options.plan, job, options.asynchrony)
        if self._given is not None and options.wait_for == 1 and not options.local:
            options = replace(options, wait_for=len(self._given.device_names | {mesh.name}))
        self._options = options
        self._has_announced = False  # a plan
        self._tell = emit
        self._folder = None if options.local or options.dry_run else folder
        self._callbacks = CallbackRunner(job.callbacks, self._folder)
        self._elsewhere = None if folder is None else folder.path
        self._interrupted: asyncio.Future[int] | None = None  # the step whose weights are here
        self._sizes: _OtherSizes | None = None  # from then until rounds go on
        self._profiler = ClusterProfiler(mesh, settings.work_limits)
        asked = mesh, self._folder, self._options, self._emit, self._profiler
        self._start = JobStart(*asked, settings.answer_seconds)
        self._id = ""  # until it is known which job this is
        self._prepared: PreparedJob  # from then on
        self._entry: JournalEntry  # as this process began with it
        self._weights: TrainedWeights
        self._journal: Journal
        self._reports: JobReports
        self._checkpointer: Checkpointer | None = None
        self._since = monotonic()
        self._comparing: asyncio.Task[tuple[str, ...]] | None = None
        self._differs: tuple[str, ...] = ()  # by rounding, what is captured from plain torch
        self._generation: HolderGeneration | None = None
        self._frozen: Known = {}
        self._feeding: ReplayFeed | None = None
        spans = CollectorSettings() if options.trace is not None else WATCHED
        self._spans = SpanCollector(mesh, device.router.spans, self._trained_on, spans)
        self._running: JobDriver | None = None
        self._energy = EnergyCounter(
            mesh, device.energy, self._trained_on, lambda: self._reports.samples
        )
        self._facts = FactGatherer(
            *(mesh, type(job.model).__name__, self._spans, self._energy),
            *(self._trained_on, lambda: self._running, self._warn),
        )
        self._spoiled = SpoiledUpdates()

    @property
    def job_id(self) -> str:
        """Which job this is; empty until the members have been asked for an unfinished one."""
        return self._id

    @property
    def waits(self) -> str | None:
        """What the job waits for now that is no device: a read, a callback; None = nothing."""
        if self._pause.is_on:
            return "paused"
        if self._generation is not None and not self._generation.waits_for_user:
            return None
        doing = doings.longest(WAITED_SECONDS)
        if doing is None:
            return None
        return f"waiting for data: {doing}" if doing.startswith(READING) else f"waiting: {doing}"

    @property
    def limit(self) -> str:
        """What limits it now, in a sentence, as far as rounds show without being watched."""
        facts = self._facts.known()
        return self.waits or ("" if facts is None else limit_words(facts))

    @property
    def energy(self) -> str:
        """What it has used, in a sentence; "" before its first plan."""
        facts = self._facts.known()
        return "" if facts is None else energy_words(facts)

    async def run(self) -> None:
        """Train; in the end the weights are in the user's module and in `options.out`.

        Raises:
            UserError: the job, the script's data or the options have to change.
            DeviceLost: what a device had is nowhere any more.
            PeerError: the household could not do it.
        """
        how = self._options.asynchrony
        if how is not None and how.weights is Weights.UNSTASHED:
            self._warn(
                "with --no-stashing the gradients belong to other weights than the outputs: for "
                "comparisons only"
            )
        saying = asyncio.create_task(doings.say(self._warn), name="say what takes long")
        try:
            await self._run()
        except CallbackFailed as failed:
            await self._callbacks.end(events.Error(str(failed)))
            raise note_callback(failed.error, str(failed)) from failed.error.__cause__
        except Exception as error:
            await self._callbacks.end(events.Error(str(error) or type(error).__name__))
            raise
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERRUPT_SECONDS):
                    await self._callbacks.end(Stopped())
            raise
        finally:
            self._callbacks.close()
            saying.cancel()

    def _emit(self, event: Event) -> None:
        self._facts.note(event)
        self._tell(event)
        self._callbacks.put(event)

    async def _run(self) -> None:
        """Capture the job and train it; from where it is once more if sizes begin to differ."""
        again: CapturedAgain | None = None
        while True:
            self._generation = None
            try:
                await self._run_captured(again)
                return
            except _OtherSizes as found:
                step, again = found.point.progress.step, found.again
                self._warn(f"{found.what}: the model is captured again after step {step}")
            except BaseException as error:
                sizes = self._sizes
                if sizes is None:
                    raise
                self._weights.take(sizes.point)
                if self._folder is not None:
                    forget_journal(self._folder)
                if isinstance(error, UserError):
                    raise self._of_one_size(sizes.what, str(error)) from error
                if self._options.out is not None:
                    self._write_interrupted(self._options.out, sizes.point.progress.step)
                raise

    def _of_one_size(self, what: str, why: str = "") -> UserError:
        """Why the job ends before a batch of another size; its weights are in the user's module."""
        if self._options.out is not None:
            self._weights.write(self._options.out)
            what += f"; {self._options.out} has the weights of step {self._reports.reported.step}"
        return ScriptError(f"{what}. Pad it to one size in collate_fn{why and f': {why}'}")

    async def _run_captured(self, again: CapturedAgain | None) -> None:
        started = await self._start.run(self._job, again)
        entry, prepared = started.entry, started.prepared
        self._id, self._prepared = entry.job, prepared
        self._entry = entry
        self._callbacks.recall(self._id, entry.stopped)
        loader_memory.recall(self._folder, self._id, prepared.batches)
        for warning in prepared.warnings:
            self._warn(warning)
        if prepared.only_rounds:
            self._warn(f"training with --mode sync: {prepared.only_rounds}")
        unevaluated = missing_loss(self._job.metrics, prepared.captured)
        if unevaluated:
            self._warn(unevaluated)
        journal = self._journal = Journal(self._folder, entry, self._warn)
        if again is None:
            self._reports = JobReports(self._mesh, entry.reported, self._emit, journal.committed)
        else:
            self._reports.write = journal.committed
        reason = "the training has ended"
        self._comparing = asyncio.create_task(self._compare(), name="compare")
        try:
            self._offer(started)
            if self._options.dry_run:
                await self._plan_only()
                return
            async with self._traced():
                await self._train(started)
        except PlanError as error:
            reason = str(error)
            await self._checked()  # a model that cannot be measured may fail in plain torch too
            raise
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            self._comparing.cancel()
            await asyncio.gather(self._comparing, return_exceptions=True)
            await run_in_background(prepared.close)  # workers may read
            journal.done(goes_on=self._sizes is not None)
            loader_memory.forget(self._folder)
            self._device.states.withdraw(self._id)
            self._mesh.unroute(FETCH_MODEL)
            await self._facts.close(self._folder)
            if self._feeding is not None:
                self._feeding.close()
            seconds = self._settings.answer_seconds
            await job_registry.end_job(self._mesh, self._id, reason, seconds)

    def _traced(self) -> AbstractAsyncContextManager[None]:
        if self._options.trace is None:
            return nullcontext()
        return traced(self._spans, self._options.trace, self._warn)

    # -- before ----------------------------------------------------------------------------------

    async def _compare(self) -> tuple[str, ...]:
        """Whether the right model is captured, before this device measures it."""

        def compare() -> tuple[str, ...]:
            with as_other_threads():
                return self._prepared.compare()

        return await self._device.compute.run((0,), compare)

    async def _checked(self) -> None:
        """Raises CaptureError: another model than the user's is captured."""
        assert self._comparing is not None
        self._differs = await asyncio.shield(self._comparing)

    def _offer(self, started: StartedJob) -> None:
        """Let the others fetch the model and, where they are here, its first weights."""
        prepared = started.prepared
        description = prepared.captured.description
        model = description.to_bytes()
        self._device.known.know_own(description, prepared.job.batch_size)
        if started.has_first_weights:
            first = Version(prepared.first_step, 0)
            self._device.states.hold(self._id, first, self._first_weights)
        self._facts.open()
        self._mesh.route(FETCH_MODEL, partial(self._send_model, description.digest, model))
        self._feeding = ReplayFeed(
            self._mesh,
            self._device.router,
            self._id,
            prepared.loader,
            self._trained_on,
            is_private=self._options.private,
        )

    async def _first_weights(self, first: int, end: int) -> StoredTensors:
        digests = {name: digest for name, (_, digest) in self._frozen.items()}
        return StoredTensors.whole(end, self._prepared.slice_state(first, end), digests)

    def _trained_on(self) -> tuple[str, ...]:
        """Devices of the plan in force, or of the one that an earlier process left."""
        in_force = self._journal.in_force
        return () if in_force is None else in_force.assignment.devices

    def _announce(self, answer: ReconfigureReply, reason: ReconfigureReason) -> None:
        prepared = self._prepared
        placed = answer.assignment.placed
        takes_whole = (  # where it is elsewhere they are counted as a backup peer's
            self._options.whole_copy_due is not None and placed.protects and not placed.is_elsewhere
        )
        copies = MAX_AT_ONCE * takes_whole + (self._options.checkpoint is not None)
        kept_bytes = {self._mesh.name: copies * self._prepared.whole_bytes}
        event = plan_event(answer, prepared.captured.description, reason.value, kept_bytes)
        faulty = self._reports.faulty
        left_out = (LeftOut(o.name, faulty.get(o.name, o.reason)) for o in event.left_out)
        ties = tied_changes(answer.assignment, prepared.captured.description)
        own = *prepared.changes, *self._differs
        changes = (*own, *event.changes_results, *ties, *answer.kinds)
        links = self._measured_links(answer)
        event = replace(event, changes_results=changes, left_out=tuple(left_out), links=links)
        if self._callbacks.stopped_at is None or not self._has_announced:
            self._emit(event)  # else nothing is trained by it
        self._has_announced = True
        for change in answer.changes_results:
            self._emit(
                events.Warning(f"this plan divides micro-batches, which changes results: {change}")
            )
        if reason is ReconfigureReason.START:
            for change in own:
                self._emit(events.Warning(change))
        for warning in answer.warnings:
            self._emit(events.Warning(warning))

    def _measured_links(self, answer: ReconfigureReply) -> tuple[PlanLink, ...]:
        """Between the plan's devices and this one."""
        devices = {self._mesh.self_id, *answer.assignment.devices}
        names = {device: display_name(self._mesh, device) for device in devices}
        links = self._profiler.measured_links(names)
        return tuple(
            PlanLink(*ends, links[ends].bytes_per_s, links[ends].latency_s)
            for ends in sorted(links)
        )

    async def _send_model(self, digest: str, model: bytes, peer: str, message: Message) -> Message:
        if ModelRequest.read(message.fields).digest != digest:
            raise ProtocolError("this device holds another model")
        return Message(FETCH_MODEL, {}, (memoryview(model),), (PartKind.WEIGHT,))

    async def _plan_only(self) -> None:
        units = len(self._prepared.captured.description.units)
        asked = (
            self._prepared.plan_request(self._id, self._options),
            self._profiler,
            self._given,
            self._options,
            units,
        )
        answer = await plan_only(self._mesh, *asked)
        self._announce(answer, ReconfigureReason.START)

    # -- while -----------------------------------------------------------------------------------

    async def _train(self, started: StartedJob) -> None:
        prepared, states = started.prepared, self._device.states
        self._frozen = await run_in_background(prepared.frozen)
        journal = self._journal
        self._weights = TrainedWeights(prepared, states, self._reports, self._elsewhere)
        driver = self._running = JobDriver(
            self._mesh,
            self._prepared.plan_request(self._id, self._options),
            [unit.name for unit in prepared.captured.description.units],
            GenerationWork(
                self._make_generation,
                self._run_rounds,
                self._bring_home,
                self._announce,
                self._checked,
            ),
            journal,
            partial(states.held, self._id),
            self._reports,
            prepared.steps,
            self._options.recovery,
            profiler=self._profiler,
            settings=self._settings,
            replans=self._options.replan and self._given is None,
            leaves_out=self._job.skip_nonfinite or prepared.loss_scale is not None,
            given=self._given,
            faulty=frozenset() if self._running is None else self._running.faulty,
            writes_checkpoints=self._options.checkpoint is not None,
        )
        driver.copies.whole = self._whole_copies()
        if self._options.checkpoint is not None:
            written = CheckpointSnapshots(states, self._id, prepared, self._warn)
            checkpointer = self._checkpointer = Checkpointer(
                self._options.checkpoint,
                CheckpointSchedule(self._options.checkpoint_every, monotonic()),
                self._gather,
                self._weights.progress,
                self._warn,
                written.take,
            )
            driver.copies.readers.append(partial(self._checkpointed, checkpointer))

        def needed() -> list[int]:
            stable = None if journal.noted is None else journal.noted.stable
            return [*([] if stable is None else [stable.step]), self._reports.reported.step]

        keeping = loader_memory.keep(self._folder, self._id, prepared.batches, needed)
        beside = TaskOwner()
        beside.spawn(keeping, "note the loader's place")
        beside.spawn(self._energy.run(), "count energy")
        try:
            await self._until_interrupted(driver)
        finally:
            await beside.cancel()
            if self._checkpointer is not None:
                await self._checkpointer.close()

    def _make_generation(self, answer: ReconfigureReply) -> HolderGeneration:
        assert self._running is not None
        description = self._prepared.captured.description
        generation = self._generation = HolderGeneration(
            answer.assignment,
            description,
            self._device,
            state_check(description, self._prepared.optimizer),
            self._running.note_link,
            self._settings,
            lambda: self._callbacks.is_busy or self._pause.is_on,
            self._frozen,
            self._job.clip_grad_norm,
        )
        return generation

    async def _run_rounds(self, generation: HolderGeneration, start: int, evaluated: int) -> bool:
        driver, prepared = self._running, self._prepared
        assert driver is not None
        self._sizes = None
        await self._energy.fetch()
        if self._options.trace is not None:
            await self._spans.begin()
        if self._callbacks.stopped and self._callbacks.stopped_at is None:
            self._callbacks.stop_after(self._reports.reported.step)
        asynchronous = generation.assignment.asynchrony is not None
        course = self._course(generation.assignment.micro_batch, asynchronous)
        if self._spoiled.now is not None:  # nor is there another evaluation
            evaluated = max(evaluated, self._spoiled.now.good_steps)
        loop = TrainingLoop(
            prepared,
            course,
            generation,
            self._checkpointer,
            *(self._reports, driver.replan_watcher, driver.copies, driver.counts),
            self._callbacks,
            self._weights,
            self._journal,
            self._lengthen,
            self._pause,
            start=start,
            evaluated=evaluated,
        )
        try:
            is_done = await loop.run()
        except MicroBatchNotFinite as error:
            shape = loop.round_of(error.step)
            if shape is None:
                raise
            self._spoiled.begin(await noted(generation, error, shape))
            raise SentWrong(None, str(error), self._mesh.self_id) from None
        except StoppedEarly:
            await self._note_stop()
            raise SentWrong(None, "stopped", self._mesh.self_id) from None
        await self._note_stop()
        if loop.new_size is not None and not is_done and self._interrupted is None:
            await self._capture_again(generation, loop.new_size)
        if self._interrupted is not None:
            await self._weights.bring_home(generation)
            self._interrupted.set_result(self._reports.reported.step)
            await asyncio.get_running_loop().create_future()  # until it is cancelled
        return is_done

    async def _capture_again(self, generation: HolderGeneration, which: NewSize) -> None:
        """Returns only where the job is interrupted meanwhile.

        Raises:
            _OtherSizes: with the job's state.
            ScriptError: the model cannot be captured for that size.
        """
        needed, usable = self._prepared.whole_bytes, usable_memory_bytes()
        if which.batch is None or needed > usable:
            await self._weights.bring_home(generation)
            short = (
                f"to capture the model again takes {size_text(needed)} of memory here, and "
                f"{size_text(usable)} can be used"
            )
            raise self._of_one_size(which.what, "" if which.batch is None else short)
        point = await self._weights.checkpoint(generation, self._reports.reported.step)
        again = CapturedAgain(
            (*self._entry.sizes, which.batch.sizes),
            self._entry.first_fingerprint or self._entry.fingerprint,
            *(point, which.batch, generation.assignment.key.generation + 1),
        )
        await self._journal.captured_again(again.sizes, again.first_fingerprint, point)
        if self._interrupted is None:
            self._sizes = _OtherSizes(which.what, point, again)
            raise self._sizes

    async def _note_stop(self) -> None:
        if self._callbacks.stopped_at is not None:
            await self._journal.stopped(self._callbacks.stopped_at)

    async def _bring_home(self, generation: HolderGeneration) -> None:
        if self._spoiled.now is not None:
            await self._end_before(generation, self._spoiled.now)
            return
        steps, checkpointer = self._reports.reported.step, self._checkpointer
        last = checkpointer if steps > self._prepared.first_step else None
        if last is not None:
            await last.make_sure(generation.at(steps), lambda _: generation.gather(STAGE))
        await self._weights.bring_home(generation)
        if last is not None:
            last.conclude(steps)
        await self._finish(steps, None if checkpointer is None else checkpointer.failure)

    async def _until_interrupted(self, driver: JobDriver) -> None:
        """Run them; where that is cancelled, the weights of the last step are written first."""
        running = asyncio.create_task(driver.run(self._since), name="driver")
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            generation = None if self._sizes is not None or running.done() else self._generation
            if self._options.out is not None and generation is not None:
                await self._write_early(generation, self._options.out, running)
            raise
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _write_early(
        self, generation: HolderGeneration, out: Path, running: asyncio.Task[None]
    ) -> None:
        """After the rounds under way."""
        self._interrupted = interrupted = asyncio.get_running_loop().create_future()
        generation.draining.set()
        self._warn(f"stopping: the weights of the last step will be in {out}")
        await asyncio.wait(
            [interrupted, running],
            timeout=INTERRUPT_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not interrupted.done():
            self._warn(
                f"the weights were not written to {out}: the other devices did not send them in "
                "time"
            )
            return
        self._write_interrupted(out, interrupted.result())

    def _write_interrupted(self, out: Path, step: int) -> None:
        try:
            self._weights.write(out)
            self._warn(f"the weights of step {step} are in {out}")
        except TrainingError as error:
            self._warn(str(error))

    def _whole_copies(self) -> FullSnapshots | None:
        wants = self._options.whole_copy_due
        if wants is None and not self._options.replicas:
            return None
        return FullSnapshots(
            *(self._device.states, self._id, self._prepared, self._gather, wants),
            self._is_elsewhere,
            self._warn,
        )

    def _is_elsewhere(self) -> bool:
        return self._generation is not None and self._generation.assignment.placed.is_elsewhere

    def _course(self, micro_batch: int, asynchronous: bool) -> RoundSequence:
        stopped_at = self._callbacks.stopped_at
        return RoundSequence(
            steps=self._spoiled.steps(self._prepared.steps if stopped_at is None else stopped_at),
            micro_batch=micro_batch,
            numbers_through=asynchronous,
            least_evaluated=self._prepared.captured.evaluates.least,
        )

    def _lengthen(self, lengths: tuple[int, ...]) -> None:
        """Have a plan made for batches of such lengths."""
        assert self._generation is not None
        assert self._running is not None
        planned = [room // LENGTHS_ROOM for room in self._generation.assignment.longest]
        longest = tuple(map(max, planned, lengths))
        stretch = max(map(truediv, longest, self._prepared.captured.description.longest))
        here, before = (" x ".join(map(str, sizes)) for sizes in (lengths, planned))
        self._warn(f"a batch of length {here} has come, the plan is for {before}: making another")
        self._running.lengthen(tuple(LENGTHS_ROOM * length for length in longest), stretch)

    def _checkpointed(self, checkpointer: Checkpointer) -> Version | None:
        """The version of which a checkpoint is written, or will be: its copies stay until then."""
        if checkpointer.reading is not None or checkpointer.due is None or self._generation is None:
            return checkpointer.reading
        return Version(checkpointer.due, self._generation.assignment.key.generation)

    def _warn(self, message: str) -> None:
        self._emit(events.Warning(message))

    async def _gather(self, version: Version) -> Mapping[str, Tensor]:
        assert self._generation is not None
        return await self._generation.gather(version_source(version))

    # -- after -----------------------------------------------------------------------------------

    async def _end_before(self, generation: HolderGeneration, spoiled: Spoiled) -> None:
        """Write the weights before an update that is not finite, and say where that began.

        Raises:
            TrainingError: all of it is done.
            SentWrong: it is a device's doing, and the job can go on without it.
        """
        prepared = self._prepared
        arrived = await self._weights.arrived(generation)
        state = None if arrived is None else prepared.captured.state() | arrived
        verdict = await run_in_background(partial(judged, prepared, spoiled, state))
        self._spoiled.blame(spoiled, verdict, self._mesh.self_id)
        await self._weights.load(generation, arrived)
        out = self._options.out
        if out is not None:
            self._weights.write(out)
        place = "The model" if out is None else str(out)
        raise TrainingError(
            f"{verdict.message}. {place} has the weights of step {spoiled.good_steps}, the last "
            "good one"
        )

    async def _finish(self, steps: int, unwritten: TrainingError | None) -> None:
        """Raises CallbackFailed: one has, at the end; the weights are written."""
        out = self._options.out
        if out is not None:
            self._weights.write(out)
            failpoints.reach_now("weights.written", device=self._mesh.self_id)
        if unwritten is not None:
            raise unwritten
        self._job.numbers.end()
        samples, seconds = self._reports.samples, self._reports.seconds
        where, left_out = str(out) if out else None, self._reports.updates_left_out
        await self._energy.fetch()
        before = steps - self._reports.steps_made
        speed = rate(samples, seconds)
        done = Done(steps, seconds, speed, where, left_out, steps_before=before)
        done = with_energy(done, self._energy.use, samples)
        self._callbacks.put(done)
        await self._callbacks.caught_up()
        self._tell(done)
