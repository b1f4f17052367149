"""Trains one job from beginning to end, on the device that holds the data.

capture, wait for members ──► generations (`driver`), each with its rounds ──► fetch weights
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path
from time import monotonic

from torch import Tensor

from p2ptrain import events, failpoints
from p2ptrain.aio.threads import run_in_background
from p2ptrain.coordinator.cluster_profile import ClusterProfiler
from p2ptrain.errors import (
    PeerError,
    ProtocolError,
    ScriptError,
    TrainingError,
    UserError,
    note_callback,
)
from p2ptrain.events import Done, Event, LeftOut, PlanLink, Stopped
from p2ptrain.holder import callback_memory, loader_memory
from p2ptrain.holder.callback_runner import CallbackFailed, CallbackRunner
from p2ptrain.holder.checkpointer import Checkpointer, CheckpointSchedule, split_state
from p2ptrain.holder.driver import JobDriver
from p2ptrain.holder.dry_run import plan_only
from p2ptrain.holder.energy_counter import EnergyCounter, with_energy
from p2ptrain.holder.fact_gatherer import FactGatherer
from p2ptrain.holder.full_snapshots import MAX_AT_ONCE, CheckpointSnapshots, FullSnapshots
from p2ptrain.holder.generation import HolderGeneration, SentWrong, UpdateNotFinite
from p2ptrain.holder.generation_runner import GenerationWork
from p2ptrain.holder.input.batch_layout import NewSize, ReadBatch
from p2ptrain.holder.input.feeder import ReplayFeed
from p2ptrain.holder.input.metrics import missing_loss
from p2ptrain.holder.job_record import JobRecord
from p2ptrain.holder.pause import JobPause
from p2ptrain.holder.reports import JobReports, plan_event, rate
from p2ptrain.holder.round_watch import WATCHED, RoundWatch
from p2ptrain.holder.spoiled_update import Spoiled, SpoiledUpdates, judged, noted
from p2ptrain.holder.start import job_registry
from p2ptrain.holder.start.given_plan import given_plan
from p2ptrain.holder.start.job_start import JobStart, StartedJob
from p2ptrain.holder.start.journal import Journal
from p2ptrain.holder.start.model_limits import private_units, why_unshared
from p2ptrain.holder.start.prepare import whole_state
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.holder.start.resumed_job import CapturedAgain
from p2ptrain.holder.trace.span_collector import CollectorSettings, SpanCollector, traced
from p2ptrain.holder.training_loop import (
    AsyncTrainingLoop,
    LoopCallbacks,
    StoppedEarly,
    TrainingLoop,
)
from p2ptrain.job.asynchrony import is_due
from p2ptrain.job.callbacks import SaveBest
from p2ptrain.job.given_weights import hint_of
from p2ptrain.job.job import Job
from p2ptrain.job.last_job import keep_facts
from p2ptrain.job.rounds import LENGTHS_ROOM, RoundSequence
from p2ptrain.job.state_callback import StateCallback, TrainedState, WantedState
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.job.user_code import READING, doings
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import display_name
from p2ptrain.messages.job_requests import ModelRequest
from p2ptrain.messages.kinds import EXPLAIN, FETCH_MODEL, ROUND_PICTURE
from p2ptrain.messages.plan_request import HINT_LENGTH, JobPlanRequest
from p2ptrain.messages.reconfigure import PlanInForce, ReconfigureReply
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.stage.optimizer import AVERAGE
from p2ptrain.net.message import Message, PartKind
from p2ptrain.plan.explain import limit_words
from p2ptrain.plan.types.weight_versions import Weights
from p2ptrain.process.allocator import trim_heap
from p2ptrain.process.compute_thread import as_other_threads
from p2ptrain.process.memory_budget import usable_memory_bytes
from p2ptrain.recovery.generation_request import ReconfigureReason
from p2ptrain.recovery.recovery_settings import HOME, RecoverySettings
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.device import LocalDevice
from p2ptrain.state.checkpoint_files import Checkpoint, CheckpointProgress, save
from p2ptrain.state.checksums import Digest
from p2ptrain.state.fetch import state_check, version_source
from p2ptrain.state.transfer_client import Known
from p2ptrain.state.transfer_server import AVERAGES, STAGE, in_memory
from p2ptrain.state.weights_files import average_path, save_elsewhere, save_weights

log = get_logger(__name__)

INTERRUPT_SECONDS = 30.0
"""For the rounds under way and the weights' way home, after an interrupt."""

WAITED_SECONDS = 3.0
"""For a read or a callback, until it is said to others."""

HOME_SHARE = 0.25
"""Of free memory, for the trained weights beside those that the job began with."""


class _Sizes(Exception):  # it is no error
    """The model is to be captured again: a size differs that did not so far.

    Args:
        prepared: by which the state is put into the user's module.
    """

    def __init__(self, which: NewSize, prepared: PreparedJob, again: CapturedAgain) -> None:
        super().__init__("its model is captured for other sizes")
        self.which, self.prepared, self.again = which, prepared, again


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
        self._callbacks = CallbackRunner(job.callbacks)
        self._averages: Mapping[str, Tensor] | None = None  # of the weights, once they are here
        self._captured_state: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
        self._stopped_at: int | None = None  # updates after which a callback has ended the job
        self._has_announced = False  # a plan
        self._tell = emit
        self._folder = None if options.local or options.dry_run else folder
        self._elsewhere = None if folder is None else folder.path
        self._interrupted: asyncio.Future[int] | None = None  # the step whose weights are here
        self._surveyor = ClusterProfiler(mesh, settings.work_limits)
        asked = mesh, self._folder, self._options, self._emit, self._surveyor
        self._start = JobStart(*asked, settings.answer_seconds)
        self._id = ""  # until it is known which job this is
        self._since = monotonic()
        self._comparing: asyncio.Task[tuple[str, ...]] | None = None
        self._differs: tuple[str, ...] = ()  # by rounding, what is captured from plain torch
        self._epoch: HolderGeneration | None = None
        self._in_force: PlanInForce | None = None
        self._frozen: Known = {}
        self._feeding: ReplayFeed | None = None
        spans = CollectorSettings() if options.trace is not None else WATCHED
        self._spans = SpanCollector(mesh, device.switchboard.spans, self._trained_on, spans)
        self._running: JobDriver | None = None
        self._energy = EnergyCounter(mesh, device.energy, self._trained_on)
        self._facts = FactGatherer(
            *(mesh, type(job.model).__name__, self._spans, self._energy),
            lambda: None if self._running is None else self._running.elastic,
            lambda: None if self._running is None else self._running.question,
        )
        self._watch = RoundWatch(
            *(mesh, self._spans, self._trained_on),
            lambda: None if self._running is None else self._running.elastic.plan,
            lambda: None if self._running is None else self._running.question,
        )
        self._spoiled = SpoiledUpdates()
        self._faulty: Mapping[str, str] = {}  # names of devices that get no more work, and why

    @property
    def job_id(self) -> str:
        """Which job this is; empty until the members have been asked for an unfinished one."""
        return self._id

    @property
    def waits(self) -> str | None:
        """What the job waits for now that is no device: a read, a callback; None = nothing."""
        if self._pause.is_on:
            return "paused"
        if self._epoch is not None and not self._epoch.waits_for_user:
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
        sizes: _Sizes | None = None
        while True:
            self._epoch = None
            try:
                await self._run_captured(None if sizes is None else sizes.again)
                return
            except _Sizes as found:
                step = found.again.checkpoint.progress.step
                if found.which.batch is None:
                    raise self._of_one_size(found, None) from None
                self._warn(f"{found.which}: the model is captured again after step {step}")
                sizes = found
            except UserError as error:
                if sizes is None or self._epoch is not None:
                    raise
                raise self._of_one_size(sizes, error) from error

    def _of_one_size(self, sizes: _Sizes, error: UserError | None) -> UserError:
        """Why the job ends before a batch, and where its weights are."""
        progress, words = sizes.again.checkpoint.progress, str(sizes.which)
        sizes.prepared.captured.load_state(sizes.again.checkpoint.model)
        if self._options.out is not None:
            self._write(self._options.out)
            words += f"; {self._options.out} has the weights of step {progress.step}"
        why = "" if error is None else f": {error}"
        return ScriptError(f"{words}. Pad it to one size in collate_fn{why}")

    async def _run_captured(self, again: CapturedAgain | None) -> None:
        started = await self._start.run(self._job, again)
        self._id, self._stopped_at = started.entry.job, started.entry.stopped
        callback_memory.recall(self._folder, self._id, self._job.callbacks)
        loader_memory.recall(self._folder, self._id, started.prepared.batches)
        for warning in started.prepared.warnings:
            self._warn(warning)
        if started.prepared.only_rounds:
            self._warn(f"training with --mode sync: {started.prepared.only_rounds}")
        unevaluated = missing_loss(self._job.metrics, started.prepared.captured)
        if unevaluated:
            self._warn(unevaluated)
        journal = Journal(self._folder, started.entry, lambda why: self._emit(events.Warning(why)))
        reason = "the training has ended"
        self._comparing = asyncio.create_task(self._compare(started.prepared), name="compare")
        try:
            self._offer(started)
            if self._options.dry_run:
                await self._plan_only(started.prepared)
                return
            async with self._traced():
                await self._train(started, journal, () if again is None else again.batches)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            self._comparing.cancel()
            await asyncio.gather(self._comparing, return_exceptions=True)
            await run_in_background(started.prepared.close)  # workers may read
            journal.done()
            loader_memory.forget(self._folder)
            self._device.states.withdraw(self._id)
            self._mesh.unroute(FETCH_MODEL)
            self._mesh.unroute(EXPLAIN)
            self._mesh.unroute(ROUND_PICTURE)
            await self._watch.close()
            self._keep_facts()
            if self._feeding is not None:
                self._feeding.close()
            seconds = self._settings.answer_seconds
            await job_registry.end_job(self._mesh, self._id, reason, seconds)

    async def _explain(self, peer: str, message: Message) -> Message:
        facts = await self._facts.facts()
        if facts is None:
            raise PeerError(f"{self._mesh.name} has no plan for its training yet")
        return Message(EXPLAIN, {}, (facts.to_part(),))

    async def _show_rounds(self, peer: str, message: Message) -> Message:
        return Message(ROUND_PICTURE, {}, ((await self._watch.picture()).to_part(),))

    def _keep_facts(self) -> None:
        """For `p2ptrain explain` afterwards."""
        facts = self._facts.known(is_over=True)
        if facts is not None and self._folder is not None:
            try:
                keep_facts(self._folder, facts)
            except UserError as error:
                self._warn(f"what limited this training is not written down: {error}")

    def _traced(self) -> AbstractAsyncContextManager[None]:
        if self._options.trace is None:
            return nullcontext()
        return traced(self._spans, self._options.trace, self._warn)

    # -- before ----------------------------------------------------------------------------------

    async def _compare(self, prepared: PreparedJob) -> tuple[str, ...]:
        """Whether the right model is captured, before this device measures it."""

        def compare() -> tuple[str, ...]:
            with as_other_threads():
                return prepared.compare()

        return await self._device.compute.run((0,), compare)

    async def _checked(self) -> None:
        """Raises CaptureError: another model than the user's is captured."""
        assert self._comparing is not None
        self._differs = await asyncio.shield(self._comparing)

    def _offer(self, started: StartedJob) -> None:
        """Let the others fetch the model and, where they are here, its first weights."""
        prepared, self._in_force = started.prepared, started.entry.in_force
        self._captured_state = prepared.captured.state_dict
        description = prepared.captured.description
        model = description.to_bytes()
        self._device.known.know_own(description, prepared.job.batch_size)
        if started.has_first_weights:
            first = version_source(Version(prepared.first_step, 0))
            source = in_memory(prepared.slice_state)
            self._device.states.hold(self._id, first, source, self._frozen_digests)
        self._mesh.route(EXPLAIN, self._explain)
        self._mesh.route(ROUND_PICTURE, self._show_rounds)
        self._mesh.route(FETCH_MODEL, partial(self._send_model, description.digest, model))
        self._feeding = ReplayFeed(
            self._mesh,
            self._device.switchboard,
            self._id,
            prepared.loader,
            self._trained_on,
            is_private=self._options.private,
        )

    def _frozen_digests(self, _first: int, _end: int) -> Mapping[str, Digest]:
        return {name: digest for name, (_, digest) in self._frozen.items()}

    def _trained_on(self) -> tuple[str, ...]:
        """Devices of the plan in force, or of the one that an earlier process left."""
        if self._epoch is not None:
            return self._epoch.assignment.devices
        in_force = self._in_force
        return () if in_force is None else in_force.assignment.devices

    def _announce(
        self, prepared: PreparedJob, answer: ReconfigureReply, reason: ReconfigureReason
    ) -> None:
        takes_whole = self._wants_whole_copy() is not None and answer.assignment.protects
        copies = MAX_AT_ONCE * takes_whole + (self._options.checkpoint is not None)
        kept_bytes = {self._mesh.name: copies * self._whole_bytes(prepared)}
        event = plan_event(answer, prepared.captured.description, reason.value, kept_bytes)
        faulty = self._faulty
        left_out = (LeftOut(o.name, faulty.get(o.name, o.reason)) for o in event.left_out)
        own = *prepared.changes, *self._differs
        changes = (*own, *event.changes_results, *answer.kinds)
        links = self._measured_links(answer)
        event = replace(event, changes_results=changes, left_out=tuple(left_out), links=links)
        if self._stopped_at is None or not self._has_announced:  # else nothing is trained by it
            self._emit(event)
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
        links = self._surveyor.measured_links(names)
        return tuple(
            PlanLink(*ends, links[ends].bytes_per_s, links[ends].latency_s)
            for ends in sorted(links)
        )

    async def _send_model(self, digest: str, model: bytes, peer: str, message: Message) -> Message:
        if ModelRequest.read(message.fields).digest != digest:
            raise ProtocolError("this device holds another model")
        return Message(FETCH_MODEL, {}, (memoryview(model),), (PartKind.WEIGHT,))

    def _request(self, prepared: PreparedJob) -> JobPlanRequest:
        job, description = prepared.job, prepared.captured.description
        private = private_units(description) if self._options.private else (0, 0)
        sharing, how, rounds = prepared.sharing, self._options.asynchrony, None
        if self._options.mode == "auto":
            rounds = sharing
            if prepared.only_rounds or self._options.local:
                how = rounds = None
        if how is not None and not sharing.unshared:
            sharing = replace(sharing, unshared=why_unshared(how, description))
        return JobPlanRequest(
            job=self._id,
            digest=description.digest,
            model=type(job.model).__name__,
            input_bytes=prepared.input_bytes,
            target_bytes=prepared.target_bytes,
            optimizer_state_ratio=prepared.optimizer_state_ratio,
            batch_size=job.batch_size,
            micro_batch=job.fixed_micro_batch,
            least_piece=prepared.least_piece,
            planner=self._options.planner,
            private_first=private[0],
            private_last=private[1],
            optimizer=prepared.optimizer,
            seed=job.seed,
            clip=job.clip_grad_norm is not None,
            first_step=prepared.first_step,
            alone=self._options.local,
            sharing=sharing,
            wire=self._options.wire,
            replicas=self._options.replicas,
            checkpoints=self._reads_versions,
            asynchrony=how,
            ftpipehd=self._options.as_ftpipehd,
            eval_samples=0 if prepared.evaluation is None else prepared.evaluation.samples,
            least_evaluated=prepared.captured.evaluates.least,
            weighed=prepared.count is not None,
            rounds=rounds,
            longest=tuple(LENGTHS_ROOM * n for n in description.longest),
            weights="" if job.weights is None else hint_of(Path(job.weights), HINT_LENGTH),
            maps=prepared.maps,
            grid=self._options.grid,
            groups_of_units=self._options.groups,
            fast_math=job.fast_math,
        )

    @property
    def _reads_versions(self) -> bool:
        """Whether versions are read during training: for checkpoints, or to be held here."""
        return self._options.checkpoint is not None or self._wants_whole_copy() is not None

    async def _plan_only(self, prepared: PreparedJob) -> None:
        units = len(prepared.captured.description.units)
        asked = self._request(prepared), self._surveyor, self._given, self._options, units
        answer = await plan_only(self._mesh, *asked)
        self._announce(prepared, answer, ReconfigureReason.START)

    # -- while -----------------------------------------------------------------------------------

    async def _train(
        self, started: StartedJob, journal: Journal, news: tuple[ReadBatch, ...]
    ) -> None:
        """`news`: batches whose sizes the model is captured for, besides the first ones."""
        prepared = started.prepared
        description = prepared.captured.description
        check = state_check(description, prepared.optimizer)
        self._frozen = await run_in_background(prepared.frozen)
        epochs: JobDriver

        def progress(step: int) -> CheckpointProgress:
            return replace(prepared.progress(step), evaluated=epochs.reports.reported.evaluated)

        checkpointer = self._checkpointer(progress)

        def make_epoch(answer: ReconfigureReply) -> HolderGeneration:
            epoch = HolderGeneration(
                answer.assignment,
                description,
                self._device,
                check,
                epochs.note_link,
                self._settings,
                lambda: self._callbacks.is_busy or self._pause.is_on,
                self._frozen,
            )
            if self._job.clip_grad_norm is not None:
                epoch.clip_to(self._job.clip_grad_norm)
            self._epoch = epoch
            return epoch

        callbacks = LoopCallbacks(
            self._callbacks,
            self._stop_after,
            partial(self._save_best, prepared),
            partial(callback_memory.keep, self._folder, self._id, self._job.callbacks),
            partial(self._give_state, prepared, progress),
        )

        async def train(epoch: HolderGeneration, start: int, evaluated: int) -> bool:
            await self._energy.fetch()
            if self._options.trace is not None:
                await self._spans.begin()
            if self._callbacks.stopped and self._stopped_at is None:
                self._stop_after(epochs.reports.reported.step)
            asynchronous = epoch.assignment.asynchrony is not None
            course = self._course(prepared, epoch.assignment.micro_batch, asynchronous)
            if self._spoiled.now is not None:  # nor is there another evaluation
                evaluated = max(evaluated, self._spoiled.now.good_steps)
            loop = (AsyncTrainingLoop if asynchronous else TrainingLoop)(
                prepared,
                course,
                epoch,
                checkpointer,
                *(epochs.reports, epochs.elastic, epochs.copies, epochs.counts, callbacks),
                *(journal.measured, journal.scaled),
                partial(self._lengthen, epochs, description),
                self._pause,
                start=start,
                evaluated=evaluated,
            )
            try:
                is_done = await loop.run()
            except UpdateNotFinite as error:
                shape = loop.round_of(error.step)
                if shape is None:
                    raise
                self._spoiled.begin(await noted(prepared, epoch, error, shape))
                raise SentWrong(None, str(error), self._mesh.self_id) from None
            except StoppedEarly:
                await self._note_stop(journal)
                raise SentWrong(None, "stopped", self._mesh.self_id) from None
            await self._note_stop(journal)
            if loop.new_size is not None and not is_done:
                point = progress(epochs.reports.reported.step)
                raise await self._captured_again(prepared, epoch, loop.new_size, point, news)
            if self._interrupted is not None:
                await self._bring_home(prepared, epoch, lambda: None)
                self._interrupted.set_result(epochs.reports.reported.step)
                await asyncio.get_running_loop().create_future()  # until it is cancelled
            return is_done

        async def bring_home(epoch: HolderGeneration, overwriting: Callable[[], None]) -> None:
            if self._spoiled.now is not None:
                await self._end_before(prepared, epoch, overwriting, self._spoiled.now)
                return
            steps = epochs.reports.reported.step
            last = checkpointer if steps > prepared.first_step else None
            if last is not None:
                await last.make_sure(epoch.at(steps), lambda _: epoch.gather(STAGE))
            await self._bring_home(prepared, epoch, overwriting)
            if last is not None:
                last.conclude(steps)
            failure = checkpointer.failure if checkpointer is not None else None
            await self._finish(steps, epochs.reports, failure)

        memory = JobRecord(
            started.entry,
            journal,
            has_first_weights=started.has_first_weights,
            since=self._since,
            settings=self._settings,
        )
        if checkpointer is not None:
            states = self._device.states
            written = CheckpointSnapshots(states, self._id, prepared, self._warn)
            checkpointer.on_written = written.take
            memory.written = written
        epochs = JobDriver(
            self._mesh,
            self._request(prepared),
            [unit.name for unit in description.units],
            GenerationWork(
                make_epoch, train, bring_home, partial(self._announce, prepared), self._checked
            ),
            memory,
            self._emit,
            prepared.steps,
            self._options.recovery,
            surveyor=self._surveyor,
            settings=self._settings,
            replans=self._options.replan and self._given is None,
            leaves_out=self._job.skip_nonfinite or prepared.loss_scale is not None,
            given=self._given,
        )
        self._faulty, self._running = epochs.reports.faulty, epochs
        if checkpointer is not None:
            epochs.copies.readers.append(partial(self._checkpointed, checkpointer))
        whole = memory.whole = self._whole_copies(prepared)
        if whole is not None:
            epochs.copies.readers.append(lambda: whole.reading)

        def needed() -> list[int]:
            stable = None if memory.noted is None else memory.noted.stable
            return [*([] if stable is None else [stable.step]), epochs.reports.reported.step]

        keeping = loader_memory.keep(self._folder, self._id, prepared.batches, needed)
        noting = asyncio.create_task(keeping, name="note the loader's place")
        metering = asyncio.create_task(self._energy.run(), name="count energy")
        try:
            await self._until_interrupted(epochs)
        finally:
            noting.cancel()
            metering.cancel()
            await asyncio.gather(noting, metering, return_exceptions=True)
            if whole is not None:
                await whole.close()
            if checkpointer is not None:
                await checkpointer.close()

    async def _until_interrupted(self, epochs: JobDriver) -> None:
        """Run them; where that is cancelled, the weights of the last step are written first."""
        running = asyncio.create_task(epochs.run(), name="epochs")
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            if self._options.out is not None and self._epoch is not None and not running.done():
                await self._write_early(self._epoch, self._options.out, running)
            raise
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _write_early(
        self, epoch: HolderGeneration, out: Path, running: asyncio.Task[None]
    ) -> None:
        """After the rounds under way."""
        self._interrupted = interrupted = asyncio.get_running_loop().create_future()
        epoch.draining.set()
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
        try:
            self._write(out)
            self._warn(f"the weights of step {interrupted.result()} are in {out}")
        except TrainingError as error:
            self._warn(str(error))

    def _write(self, out: Path) -> None:
        """Write the weights, elsewhere where they cannot be written there.

        Raises:
            TrainingError: they could not be written there; says where they are.
        """
        state = self._job.model.state_dict().items()  # a module's extra state may be anything
        tensors = {name: value for name, value in state if isinstance(value, Tensor)}
        self._save(out, tensors)
        if self._averages is not None:
            self._save(average_path(out), self._captured_state(self._averages))

    def _save(self, out: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            save_weights(out, tensors)
        except TrainingError as error:
            folders = self._elsewhere, Path(tempfile.gettempdir())
            place = save_elsewhere(out.name, tensors, folders)
            if place is None:
                raise
            raise TrainingError(f"{error}. They are in {place} instead") from error

    async def _averages_of(self, epoch: HolderGeneration) -> dict[str, Tensor] | None:
        """Of the weights, by name; None where none are kept."""
        if self._job.ema is None:
            return None
        found: dict[str, Tensor] = {}
        await epoch.bring_home(found.update, AVERAGES)
        return {
            name.removeprefix("optimizer:").removesuffix(f".{AVERAGE}"): tensor
            for name, tensor in found.items()
        }

    def _whole_copies(self, prepared: PreparedJob) -> FullSnapshots | None:
        wants = self._wants_whole_copy()
        if wants is None:
            return None
        return FullSnapshots(
            self._device.states,
            self._id,
            prepared.captured.description,
            self._gather,
            wants,
            prepared.first_step,
            self._whole_bytes(prepared),
            self._warn,
        )

    def _whole_bytes(self, prepared: PreparedJob) -> int:
        """Of one version of the whole model and its optimizer, beside the first weights here."""
        return whole_state(prepared.captured, prepared.optimizer).changing_bytes

    def _wants_whole_copy(self) -> Callable[[int, int], bool] | None:
        """By the version copied last, and a newer one; None = none is wanted."""
        if self._options.as_ftpipehd is not None:
            return self._options.as_ftpipehd.copies_whole
        every = self._options.whole_copies
        return None if every is None else partial(is_due, every)

    def _course(self, prepared: PreparedJob, micro_batch: int, asynchronous: bool) -> RoundSequence:
        return RoundSequence(
            steps=self._spoiled.steps(self._steps(prepared)),
            micro_batch=micro_batch,
            numbers_through=asynchronous,
            least_evaluated=prepared.captured.evaluates.least,
        )

    def _steps(self, prepared: PreparedJob) -> int | None:
        """Updates in all."""
        return prepared.steps if self._stopped_at is None else self._stopped_at

    def _lengthen(
        self, epochs: JobDriver, description: ModelDescription, lengths: tuple[int, ...]
    ) -> None:
        """Have a plan made for batches of such lengths."""
        assert self._epoch is not None
        planned = [room // LENGTHS_ROOM for room in self._epoch.assignment.longest]
        longest = tuple(map(max, planned, lengths))
        stretch = max(map(truediv, longest, description.longest))
        here, before = (" x ".join(map(str, sizes)) for sizes in (lengths, planned))
        self._warn(f"a batch of length {here} has come, the plan is for {before}: making another")
        epochs.lengthen(tuple(LENGTHS_ROOM * length for length in longest), stretch)

    def _stop_after(self, step: int) -> None:
        """A callback has ended the job with so many updates."""
        self._stopped_at = step
        log.info("stopped_by_callback", step=step, why=self._callbacks.stopped)

    async def _note_stop(self, journal: Journal) -> None:
        if self._stopped_at is not None:
            await journal.stopped(self._stopped_at)

    async def _save_best(
        self, prepared: PreparedJob, epoch: HolderGeneration, best: SaveBest
    ) -> None:
        arrived = await self._arrived_whole(prepared, epoch)
        if arrived is None:
            self._warn(f"this device has too little memory to write {best.path}: it is left out")
            return
        state: dict[str, Tensor] = {}
        for part in arrived:
            state |= split_state(part)[0]
        if self._job.eval_with_ema:
            state |= await self._averages_of(epoch) or {}
        written = prepared.captured.state_dict(state)
        try:
            await run_in_background(partial(save_weights, best.path, written))
        except TrainingError as error:
            self._warn(str(error))

    async def _give_state(
        self,
        prepared: PreparedJob,
        progress: Callable[[int], CheckpointProgress],
        epoch: HolderGeneration,
        step: int,
        callback: StateCallback,
    ) -> None:
        """Raises TrainingError: this device has too little memory for it."""
        write: Callable[[Path], None] | None = None
        if callback.wanted is WantedState.ALL:
            model, optimizer = split_state(await epoch.gather(STAGE))
            checkpoint = Checkpoint(progress(step), model, optimizer)

            def write(folder: Path) -> None:
                save(folder, checkpoint)
        else:
            model = await self._weights(prepared, epoch)
        state = TrainedState(step, prepared.captured.state_dict(model), write)
        await self._callbacks.give(callback, state)

    async def _weights(self, prepared: PreparedJob, epoch: HolderGeneration) -> dict[str, Tensor]:
        arrived = await self._arrived_whole(prepared, epoch)
        if arrived is None:
            raise TrainingError(
                "this device has too little memory for the weights that a callback works with: "
                "free some, or evaluate and save less often"
            )
        return {n: tensor for part in arrived for n, tensor in split_state(part)[0].items()}

    async def _captured_again(
        self,
        prepared: PreparedJob,
        epoch: HolderGeneration,
        which: NewSize,
        progress: CheckpointProgress,
        news: tuple[ReadBatch, ...],
    ) -> _Sizes:
        model, optimizer = split_state(await epoch.gather(STAGE))
        point = Checkpoint(progress, model, optimizer)
        batches = news if which.batch is None else (*news, which.batch)
        again = CapturedAgain(point, batches, epoch.assignment.key.epoch + 1)
        return _Sizes(which, prepared, again)

    def _checkpointer(self, progress: Callable[[int], CheckpointProgress]) -> Checkpointer | None:
        folder = self._options.checkpoint
        if folder is None:
            return None
        return Checkpointer(
            folder,
            CheckpointSchedule(self._options.checkpoint_every, monotonic()),
            self._gather,
            progress,
            self._warn,
        )

    def _checkpointed(self, checkpointer: Checkpointer) -> Version | None:
        """The version of which a checkpoint is written, or will be: its copies stay until then."""
        if checkpointer.reading is not None or checkpointer.due is None or self._epoch is None:
            return checkpointer.reading
        return Version(checkpointer.due, self._epoch.assignment.key.epoch)

    def _warn(self, message: str) -> None:
        self._emit(events.Warning(message))

    async def _gather(self, version: Version) -> Mapping[str, Tensor]:
        assert self._epoch is not None
        return await self._epoch.gather(version_source(version))

    # -- after -----------------------------------------------------------------------------------

    async def _end_before(
        self,
        prepared: PreparedJob,
        epoch: HolderGeneration,
        overwriting: Callable[[], None],
        spoiled: Spoiled,
    ) -> None:
        """Write the weights before an update that is not finite, and say where that began.

        Raises:
            TrainingError: all of it is done.
            SentWrong: it is a device's doing, and the job can go on without it.
        """
        arrived = await self._arrived_whole(prepared, epoch)
        state: dict[str, Tensor] | None = None
        if arrived is not None:
            state = dict(prepared.captured.state())
            for part in arrived:
                state |= split_state(part)[0]
        verdict = await run_in_background(partial(judged, prepared, spoiled, state))
        if verdict.liar is not None and verdict.liar != self._mesh.self_id:
            self._spoiled.over()
            raise SentWrong(
                verdict.liar,
                f"{spoiled.names[verdict.liar]} sent values that the model cannot give, at step "
                f"{spoiled.error.step}",
                self._mesh.self_id,
            )
        if verdict.is_of_others:
            self._try_without(spoiled)
        await self._load(prepared, epoch, overwriting, arrived)
        out = self._options.out
        if out is not None:
            self._write(out)
        place = "The model" if out is None else str(out)
        raise TrainingError(
            f"{verdict.message}. {place} has the weights of step {spoiled.good_steps}, the last "
            "good one"
        )

    def _try_without(self, spoiled: Spoiled) -> None:
        """Raises SentWrong: there is one of those that it may be who has not been left out yet."""
        suspects = spoiled.suspects(self._mesh.self_id)
        trial = self._spoiled.suspect(suspects)
        if trial is None:
            return
        device, cleared = trial
        self._spoiled.over()
        names = [spoiled.names[one] for one in suspects]
        name, step = spoiled.names[device], spoiled.error.step
        why = (
            f"step {step} has NaN or infinite values, but not where this device computes it alone: "
            f"{' or '.join(names)} sends wrong values"
        )
        if len(names) > 1:
            why += f": continuing without {name}"
        raise SentWrong(
            device, why, self._mesh.self_id, frozenset(() if cleared is None else (cleared,))
        )

    async def _arrived_whole(
        self, prepared: PreparedJob, epoch: HolderGeneration
    ) -> list[Mapping[str, Tensor]] | None:
        """All trained weights beside the first ones; None where memory is short for that."""
        trim_heap()
        whole_bytes = sum(tensor.nbytes for tensor in prepared.captured.state().values())
        if whole_bytes > HOME_SHARE * usable_memory_bytes():
            return None
        arrived: list[Mapping[str, Tensor]] = []
        await epoch.bring_home(arrived.append)
        return arrived

    async def _bring_home(
        self, prepared: PreparedJob, epoch: HolderGeneration, overwriting: Callable[[], None]
    ) -> None:
        """Everything first, and then over the first weights; stage by stage where memory is short.

        As long as the first weights stand, training can go on from them if a device dies now.
        """
        arrived = await self._arrived_whole(prepared, epoch)
        await self._load(prepared, epoch, overwriting, arrived)

    async def _load(
        self,
        prepared: PreparedJob,
        epoch: HolderGeneration,
        overwriting: Callable[[], None],
        arrived: list[Mapping[str, Tensor]] | None,
    ) -> None:
        def load(state: Mapping[str, Tensor]) -> None:
            model, _ = split_state(state)
            prepared.captured.load_state(model)

        self._averages = await self._averages_of(epoch)
        overwriting()
        first = version_source(Version(prepared.first_step, 0))
        self._device.states.let_go(self._id, first)
        if arrived is None:
            await epoch.bring_home(load)
        for state in arrived or ():
            load(state)

    async def _finish(
        self, steps: int, reports: JobReports, unwritten: TrainingError | None
    ) -> None:
        """Raises CallbackFailed: one has, at the end; the weights are written."""
        out = self._options.out
        if out is not None:
            self._write(out)
            failpoints.reach_now("weights.written", device=self._mesh.self_id)
        if unwritten is not None:
            raise unwritten
        self._job.numbers.end()
        seconds = reports.seconds
        speed = rate(reports.samples, seconds)
        where, left_out = str(out) if out else None, reports.updates_left_out
        await self._energy.fetch()
        done = Done(steps, seconds, speed, where, left_out)
        done = with_energy(done, self._energy.use, reports.samples)
        self._callbacks.put(done)
        await self._callbacks.caught_up()
        self._tell(done)
