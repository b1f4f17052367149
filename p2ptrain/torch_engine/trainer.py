"""Trains one job on the ranks of torchrun: each has the whole model and takes whole micro-batches.

    every rank    reads the mini-batch ── forwards and backwards of its own micro-batches
    all of them   sums of loss, gradients and running statistics ── the same update on each
    rank 0        evaluates, calls the callbacks, writes files, reports

What a rank computes is what a member of a household computes: the same captured stage, optimizer,
order of samples and random numbers. So with one rank results are plain torch's to the bit; with
several they differ by the order in which gradients are summed, and by nothing else. Sums are not
overlapped with the backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from p2ptrain import events
from p2ptrain.aio.tasks import run_in_background
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.errors import ScriptError, TrainingError, note_callback
from p2ptrain.events import Done, Eval, Event, PlanDevice, PlanStage
from p2ptrain.holder.input.loader import FeedItem, LoadedMicroBatch
from p2ptrain.holder.input.metrics import MetricValues, check_measured, missing_loss
from p2ptrain.holder.input.micro_batch_weights import token_place
from p2ptrain.holder.reports import rate, step_event
from p2ptrain.holder.rounds.callback_runner import CallbackFailed, CallbackRunner
from p2ptrain.holder.rounds.pause import JobPause
from p2ptrain.holder.snapshots.checkpointer import CheckpointSchedule
from p2ptrain.holder.start.job_registry import job_fingerprint
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.callbacks import StateCallback, TrainedState, WantedState
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import RoundMode, RoundSequence, samples_evaluated_together
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.model.sample_independence.class_losses import entered
from p2ptrain.state.checkpoint_files import Checkpoint, save
from p2ptrain.state.weights_files import average_path, save_weights
from p2ptrain.torch_engine.rank_stage import RankStage, shares
from p2ptrain.torch_engine.ranks import Ranks

_UNLIKE = (
    "the script gives another job here than on rank 0: model, sizes, optimizer and seed must be "
    "the same on every rank"
)

_ADVICE = "Try a smaller learning rate or clip_grad_norm=1.0"

_ALIKE_LIMIT = 1 << 20


class RankTrainer:
    """Trains one job on this rank, as a member's services train it with a household."""

    waits: str | None = None
    limit = ""
    energy = ""

    def __init__(self, ranks: Ranks, device: ComputeDevice) -> None:
        self._ranks, self._device = ranks, device

    async def train(
        self,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
        folder: StateFolder | None = None,
        *,
        pause: JobPause | None = None,
    ) -> None:
        """Train; in the end the weights are in the user's module and in `options.out`.

        Nothing pauses it: a person on another device cannot reach it.

        Raises:
            UserError: the job, the script's data or the options have to change.
            RankFailed, RanksLost: another rank has failed, or is gone.
        """
        runner = CallbackRunner(job.callbacks if self._ranks.is_first else ())

        def announce(event: Event) -> None:
            emit(event)
            runner.put(event)

        try:
            await self._train(job, options, announce, runner)
        except CallbackFailed as failed:
            await runner.end(events.Error(str(failed)))
            raise note_callback(failed.error, str(failed)) from failed.error.__cause__
        except Exception as error:
            await runner.end(events.Error(str(error) or type(error).__name__))
            raise
        finally:
            runner.close()

    async def _train(
        self,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
        runner: CallbackRunner,
    ) -> None:
        ranks, prepared = self._ranks, None
        alone = replace(options, engine="own", local=True)
        try:
            with ranks.together():
                prepared = await run_in_background(partial(prepare, job, alone))
                differs = prepared.compare() if ranks.is_first else ()
            assert prepared is not None
            mark = job_fingerprint(prepared, replace(alone, resume=None))
            unlike = mark != ranks.shared(mark)
            ranks.agree(ScriptError(_UNLIKE) if unlike else None)
            stage = RankStage(ranks, self._device, prepared)
            training = _Training(ranks, stage, prepared, options, emit, runner)
            training.announce((*prepared.changes, *differs))
            await training.run()
        finally:
            if prepared is not None:
                await run_in_background(prepared.close)  # workers may read


class _Training:
    """The rounds of one job, on one rank."""

    def __init__(
        self,
        ranks: Ranks,
        stage: RankStage,
        prepared: PreparedJob,
        options: TrainOptions,
        emit: Callable[[Event], None],
        runner: CallbackRunner,
    ) -> None:
        self._ranks, self._stage, self._prepared = ranks, stage, prepared
        self._job, self._options, self._emit, self._runner = prepared.job, options, emit, runner
        self._micro_batch = self._job.fixed_micro_batch or samples_evaluated_together(
            -(-self._job.batch_size // ranks.world), self._job.batch_size, prepared.min_micro_batch
        )
        self._token_place = token_place(prepared.captured.description)
        self._tokens = 0  # of the round
        self._loss, self._alike = 0.0, 0  # of the round, as far as it is computed here
        self._failure: Exception | None = None  # to be said at the next meeting
        self._samples = self._left_out = 0
        self._evaluation: MetricValues | None = None
        self._begins_epoch = True
        self._cadence = CheckpointSchedule(options.checkpoint_every, monotonic())
        self._began_at = self._stepped_at = monotonic()

    def announce(self, changes: Sequence[str]) -> None:
        """What is trained, and what differs from plain torch."""
        job, captured = self._job, self._prepared.captured
        for warning in (*self._prepared.warnings, missing_loss(job.metrics, captured), *changes):
            if warning:
                self._warn(warning)
        count, world = -(-job.batch_size // self._micro_batch), self._ranks.world
        dealt = shares(count, world) if world > 1 else (self._micro_batch,)
        units = (0, len(captured.description.units))
        stage = PlanStage(
            units,
            tuple(PlanDevice(f"rank {rank}", share) for rank, share in enumerate(dealt)),
            tuple(captured.description.state_dict_names(*units)),
            "micro_batches" if world > 1 else "samples",
        )
        of_plan = (1, "start", (stage,), self._micro_batch, count, 0.0, (), tuple(changes))
        self._emit(events.Plan(*of_plan))

    async def run(self) -> None:
        """Train, and write the weights."""
        stage = self._stage
        before = stage.step
        stopped = await self._course(self._prepared.steps)
        if stopped and self._prepared.evaluation is not None and stage.evaluated < stage.step:
            await self._course(stage.step)  # its evaluation
        self._bring_home()
        self._job.numbers.end()
        seconds = monotonic() - self._began_at
        out, speed = self._options.out, rate(self._samples, seconds)
        where = str(out) if out else None
        self._emit(Done(stage.step, seconds, speed, where, self._left_out, steps_before=before))
        await self._callbacks_done()

    async def _course(self, steps: int | None) -> bool:
        """All rounds up to so many updates; whether a callback has ended it before."""
        least = self._prepared.captured.evaluates.least
        course = RoundSequence(steps, self._micro_batch, least_evaluated=least)
        rounds = course, self._stage.step, self._stage.evaluated
        self._stepped_at = monotonic()
        async with aclosing(self._prepared.loader().course(*rounds)) as pieces:
            while True:
                piece = await self._read(anext(pieces, None))
                if piece is None and self._failure is None:
                    return False
                if piece is not None:
                    self._attempt(partial(self._compute, piece))
                    if piece.feed.piece.key.micro_batch < piece.planned.round.numbers[-1]:
                        continue
                if await self._round_over(piece):
                    return True

    async def _read(self, reading: Awaitable[LoadedMicroBatch | None]) -> LoadedMicroBatch | None:
        try:
            return await reading
        except Exception as error:  # which the next meeting raises
            self._failure = self._failure or error
            return None

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                act()
        except Exception as error:  # which the next meeting raises
            self._failure = error

    # -- a round ---------------------------------------------------------------------------------

    def _compute(self, piece: LoadedMicroBatch) -> None:
        shape, number = piece.planned.round, piece.feed.piece.key.micro_batch
        if number == 0:
            self._loss, self._tokens = 0.0, 0
        if shape.mode is RoundMode.EVAL:
            if self._ranks.is_first:
                self._evaluate(piece)
            return
        if number == 0:
            if torn := self._prepared.why_torn(shape):
                raise ScriptError(torn)
            self._stage.begin(shape)
        self._check_ignored(piece.feed)
        if self._token_place is not None:
            self._tokens += piece.feed.inputs[self._token_place].numel()
        if self._begins_epoch:
            self._alike = _mixed(self._alike, piece.feed)
        self._loss += self._stage.compute(piece)

    def _check_ignored(self, feed: FeedItem) -> None:
        """Raises ScriptError: targets are left out, and nothing has counted them."""
        unweighed, whole = self._prepared.unweighed, self._job.batch_size
        if unweighed is None or self._micro_batch >= whole:
            return
        description = self._prepared.captured.description
        if unweighed.leave_out(entered(description, feed.inputs, feed.targets)):
            raise ScriptError(
                "targets that the loss leaves out came up after the first samples, and parts of a "
                f"mini-batch would weigh them wrongly: set micro_batch={whole}, or give a "
                "normalizer"
            )

    async def _round_over(self, piece: LoadedMicroBatch | None) -> bool:
        """All micro-batches are computed, or something has failed; whether a callback ends it."""
        there = self._stage.has_gradients
        sums = self._ranks.meet(self._failure, self._loss, self._alike, there)
        assert piece is not None, "a failure is raised"
        step, planned = piece.planned.round.step, piece.planned
        if sums is None:
            raise ScriptError(
                f"the ranks have read different samples for step {step + 1}: let the script give "
                "every rank the same data in the same order (seed what it draws; no "
                "DistributedSampler: ranks divide each mini-batch themselves)"
            )
        self._alike = 0
        if planned.round.mode is RoundMode.EVAL:
            return planned.ends_epoch and await self._evaluation_over(step)
        self._begins_epoch = planned.ends_epoch
        self._update(piece, sums[0], sums[1:])
        stops = await self._callbacks_done()
        evaluates = planned.ends_epoch and self._prepared.evaluation is not None
        if stops or not evaluates:
            await self._checkpoint(ends_epoch=planned.ends_epoch)
        return stops

    def _update(self, piece: LoadedMicroBatch, loss: float, users: list[float]) -> None:
        shape, weights = piece.planned.round, piece.feed.weights
        step = shape.step + 1
        if weights is not None and weights.counts_nothing:
            self._warn(f"the mini-batch of step {step} counts nothing: an update without gradient")
        with self._ranks.together():
            numbers = self._prepared.numbers_of(shape.step)
        made = self._stage.update(piece, numbers, loss, users)
        if made.broken:
            self._bring_home()
            place = self._options.out or "The model"
            good = f"{place} has the weights of step {shape.step}, the last good one"
            raise TrainingError(f"{made.broken}. {_ADVICE}. {good}")
        if made.left_out:
            self._left_out += 1
            what = "has NaN or infinite values: it is skipped, and training continues"
            self._warn(f"step {step} {what}")
        self._samples += shape.samples
        now = monotonic()
        seconds, self._stepped_at = now - self._stepped_at, now
        numbers_of_step = made.rates, made.norm, made.scale, self._tokens
        self._emit(step_event(step, loss, shape.samples, seconds, *numbers_of_step))

    # -- between rounds --------------------------------------------------------------------------

    def _evaluate(self, piece: LoadedMicroBatch) -> None:
        shape, size = piece.planned.round, piece.feed.piece.size
        if self._evaluation is None:
            self._evaluation = MetricValues(self._job.metrics, self._prepared.over_all)
        loss, *leaves = self._stage.evaluate(piece)
        self._loss += loss.item() * size / shape.samples
        is_last = piece.feed.piece.key.micro_batch == shape.numbers[-1]
        if is_last:
            self._evaluation.add_loss(self._loss, shape.samples)
        if self._job.metrics:
            output = self._prepared.captured.unflatten_output(leaves)
            self._evaluation.add(output, piece.target, size, ends_batch=is_last)

    async def _evaluation_over(self, step: int) -> bool:
        """As `_round_over`."""
        numbers, name = self._job.numbers, self._job.scheduler_metric
        found: dict[str, float] = {}
        with self._ranks.together():
            if self._evaluation is not None:
                evaluation, self._evaluation = self._evaluation, None
                found = evaluation.result(has_loss=not self._prepared.captured.unscored)
                for failure in evaluation.said:
                    self._warn(failure)
                check_measured(self._job, step, found)
        found = self._ranks.shared(found)
        if numbers.needs_metric:
            numbers.note(step, found[name])
        self._stage.evaluated = step
        self._emit(Eval(step, found))
        stops = await self._callbacks_done()
        await self._checkpoint(ends_epoch=True)
        self._stepped_at = monotonic()
        return stops

    async def _callbacks_done(self) -> bool:
        """Whether one of them ends the job; on every rank."""
        if not self._job.callbacks:
            return False
        numbers, runner, captured = self._job.numbers, self._runner, self._prepared.captured
        with self._ranks.together():
            await runner.caught_up()
            for best in runner.due():
                state = self._stage.on_host()[0]
                if self._job.eval_with_ema:
                    state |= self._stage.averages()
                save_weights(best.path, captured.state_dict(state))
            while wanting := runner.wanting:
                await self._give_state(wanting[0])
        for step, metric in self._ranks.shared(numbers.measured):
            numbers.note(step, metric)
        return self._ranks.agree(wish=runner.stopped is not None)

    async def _give_state(self, callback: StateCallback) -> None:
        step, (model, optimizer) = self._stage.step, self._stage.on_host()
        write: Callable[[Path], None] | None = None
        if callback.wanted is WantedState.ALL:
            checkpoint = Checkpoint(self._prepared.progress(step), model, optimizer)

            def write(folder: Path) -> None:
                save(folder, checkpoint)

        weights = self._prepared.captured.state_dict(model)
        await self._runner.give(callback, TrainedState(step, weights, write))
        if self._job.numbers.needs_metric and callback.measured is not None:
            self._job.numbers.note(step, callback.measured)
        found, callback.evaluated = callback.evaluated, None
        if found is not None:
            self._emit(Eval(step, found))
            await self._runner.caught_up()

    async def _checkpoint(self, *, ends_epoch: bool) -> None:
        folder, now, step = self._options.checkpoint, monotonic(), self._stage.step
        if folder is None or not self._cadence.wants(step, ends_epoch=ends_epoch, now=now):
            return
        progress = replace(self._prepared.progress(step), evaluated=self._stage.evaluated)
        kept = Checkpoint(progress, *self._stage.on_host())
        try:
            await run_in_background(partial(save, folder, kept))
        except TrainingError as error:
            self._warn(str(error))
        self._cadence.taken(monotonic() - now, monotonic())

    def _bring_home(self) -> None:
        """The weights are the user's; and rank 0 writes them."""
        out, captured = self._options.out, self._prepared.captured
        with self._ranks.together():
            captured.load_state(self._stage.on_host()[0])
            if out is not None:
                state = self._job.model.state_dict().items()
                save_weights(out, {n: value for n, value in state if isinstance(value, Tensor)})
                if self._job.ema is not None:
                    save_weights(average_path(out), captured.state_dict(self._stage.averages()))

    def _warn(self, message: str) -> None:
        self._emit(events.Warning(message))


def _mixed(alike: int, feed: FeedItem) -> int:
    """A number of what has been read, below the limit."""
    digest = hashlib.sha256(str(alike).encode())
    for tensor in (*feed.inputs, *feed.targets):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:4], "big") % _ALIKE_LIMIT
