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
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor
from torch.nn import Parameter

from p2ptrain import events
from p2ptrain.aio.threads import run_in_background
from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.errors import CaptureError, ScriptError, TrainingError, note_callback
from p2ptrain.events import Done, Eval, Event, PlanDevice, PlanStage, Step
from p2ptrain.holder.callback_runner import CallbackFailed, CallbackRunner
from p2ptrain.holder.checkpointer import CheckpointSchedule, split_state
from p2ptrain.holder.input.loader import FeedItem, LoadedMicroBatch
from p2ptrain.holder.input.metrics import MetricValues, missing_loss
from p2ptrain.holder.reports import rate
from p2ptrain.holder.start.job_registry import job_fingerprint
from p2ptrain.holder.start.prepare import prepare
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.holder.training_loop import EvaluationSums
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import Round, RoundMode, RoundSequence, samples_evaluated_together
from p2ptrain.job.state_callback import StateCallback, TrainedState, WantedState
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.model.sample_independence.class_losses import entered
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failing_unit
from p2ptrain.model.stage.optimizer import StageOptimizer, trained_parameters
from p2ptrain.model.stage.running_statistics import NotShareable
from p2ptrain.model.stage.stage import Stage
from p2ptrain.plan.types.allocation import deal
from p2ptrain.recovery.commit import LEFT_OUT, Coefficient
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.executor import OperatorFailed, refused
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.not_finite import broken_update
from p2ptrain.state.checkpoint_files import Checkpoint, save
from p2ptrain.state.weights_files import average_path, save_weights
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

    def __init__(self, ranks: Ranks, device: ComputeDevice) -> None:
        self._ranks, self._device = ranks, device

    async def train(
        self,
        job: Job,
        options: TrainOptions,
        emit: Callable[[Event], None],
        folder: StateFolder | None = None,
    ) -> None:
        """Train; in the end the weights are in the user's module and in `options.out`.

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
            with ranks.together():
                mark = job_fingerprint(prepared, replace(alone, resume=None))
            unlike = mark != ranks.shared(mark)
            ranks.agree(ScriptError(_UNLIKE) if unlike else None)
            training = _Training(ranks, self._device, prepared, options, emit, runner)
            training.announce((*prepared.changes, *differs))
            await training.run()
        finally:
            if prepared is not None:
                await run_in_background(prepared.close)  # workers may read


class _Training:
    """One job that is prepared, on one rank."""

    def __init__(
        self,
        ranks: Ranks,
        device: ComputeDevice,
        prepared: PreparedJob,
        options: TrainOptions,
        emit: Callable[[Event], None],
        runner: CallbackRunner,
    ) -> None:
        self._ranks, self._device, self._prepared = ranks, device, prepared
        self._job, self._options, self._emit, self._runner = prepared.job, options, emit, runner
        self._description = description = prepared.captured.description
        state = ranks.from_first(prepared.state)
        first = ranks.shared([prepared.first_step, prepared.evaluated, self._job.numbers.measured])
        self._step, self._evaluated = first[:2]
        self._job.numbers.begin(tuple((step, value) for step, value in first[2]))
        model, slots = split_state(state)
        trained = [*trained_parameters(description)]
        with ranks.together():
            try:
                stage = Stage(
                    *(description, 0, len(description.units), model),
                    shared=ranks.world > 1,
                    device=device,
                )
            except NotShareable as error:
                raise CaptureError(f"{error}: train it with one process") from error
            optimizer = StageOptimizer(
                *(prepared.optimizer, stage.parameters()),
                prepared.optimizer.group_of(trained),
                device,
            )
            if slots:
                optimizer.load_state(slots)
        self._live = LiveStage(stage, optimizer, Version(self._step, 0), 0)
        self._order = [name for name in trained if name in optimizer.parameters]
        size = self._job.fixed_micro_batch or samples_evaluated_together(
            -(-self._job.batch_size // ranks.world), self._job.batch_size, prepared.least_piece
        )
        self._micro_batch = size
        self._loss, self._alike, self._failure = 0.0, 0, None  # type: float, int, Exception | None
        self._samples, self._left_out = 0, 0
        self._evaluating: EvaluationSums | None = None
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
        shares = _shares(count, world)
        alone = world == 1
        units = (0, len(self._description.units))
        devices = tuple(PlanDevice(f"rank {rank}", share) for rank, share in enumerate(shares))
        stage = PlanStage(
            units,
            (PlanDevice("rank 0", self._micro_batch),) if alone else devices,
            tuple(self._description.state_dict_names(*units)),
            "samples" if alone else "micro_batches",
        )
        of_plan = (1, "start", (stage,), self._micro_batch, count, 0.0, (), tuple(changes))
        self._emit(events.Plan(*of_plan))

    async def run(self) -> None:
        """Train, and write the weights."""
        stopped = await self._course(self._prepared.steps)
        if stopped and self._prepared.evaluation is not None and self._evaluated < self._step:
            await self._course(self._step)  # its evaluation
        with self._ranks.together():
            self._bring_home()
            if self._options.out is not None:
                self._write(self._options.out)
        self._job.numbers.end()
        seconds = monotonic() - self._began_at
        out = None if self._options.out is None else str(self._options.out)
        speed = rate(self._samples, seconds)
        self._emit(Done(self._step, seconds, speed, out, self._left_out))
        await self._callbacks_done()

    async def _course(self, steps: int | None) -> bool:
        """All rounds up to so many updates; whether a callback has ended it before."""
        least = self._prepared.captured.evaluates.least
        course = RoundSequence(steps, self._micro_batch, least_evaluated=least)
        loader = self._prepared.loader()
        self._stepped_at = monotonic()
        async with aclosing(loader.course(course, self._step, self._evaluated)) as pieces:
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

    async def _read(self, reading: object) -> LoadedMicroBatch | None:
        try:
            return await reading  # type: ignore[misc, no-any-return]
        except Exception as error:
            self._failure = self._failure or error
            return None

    def _attempt(self, act: Callable[[], None]) -> None:
        """What fails is said at the next meeting."""
        try:
            if self._failure is None:
                act()
        except Exception as error:
            self._failure = error

    # -- a round ---------------------------------------------------------------------------------

    def _compute(self, piece: LoadedMicroBatch) -> None:
        shape, feed, number = piece.planned.round, piece.feed, piece.feed.piece.key.micro_batch
        if number == 0:
            self._loss = 0.0
        if shape.mode is RoundMode.EVAL:
            if self._ranks.is_first:
                self._evaluate(piece)
            return
        if number == 0:
            if torn := self._prepared.why_torn(shape):
                raise ScriptError(torn)
            self._live.save(shape.micro_batches)
        self._check_ignored(feed)
        if self._begins_epoch:
            self._alike = _mixed(self._alike, feed)
        takes = deal(_shares(shape.micro_batches, self._ranks.world))
        if takes[number] != self._ranks.rank:
            return
        weight = feed.piece.size / shape.samples if feed.weights is None else feed.weights.whole
        stage, device = self._live.stage, self._device
        inputs, targets = (
            [device.copy_in(t) for t in some] for some in (feed.inputs, feed.targets)
        )
        seed = (self._job.seed, shape.step, number)
        try:
            outputs = stage.forward(number, inputs, targets, weight=weight, seed=seed)
        except OPERATORS_RAISE as error:
            raise _named(error, shape, number) from error
        loss = outputs[0].item() * weight if weight else 0.0
        stage.backward(number)
        self._loss += loss

    def _check_ignored(self, feed: FeedItem) -> None:
        """Raises ScriptError: targets are left out, and nothing has counted them."""
        unweighed = self._prepared.unweighed
        if unweighed is None or self._micro_batch >= self._job.batch_size:
            return
        if unweighed.leave_out(entered(self._description, feed.inputs, feed.targets)):
            raise ScriptError(
                "targets that the loss leaves out came up after the first samples, and parts of a "
                f"mini-batch would weigh them wrongly: set micro_batch={self._job.batch_size}, or "
                "give a normalizer"
            )

    async def _round_over(self, piece: LoadedMicroBatch | None) -> bool:
        """All micro-batches are computed, or something has failed; whether a callback ends it."""
        gradients = self._live.optimizer.gradients()
        there = [float(gradients[name] is not None) for name in self._order]
        sums = self._ranks.meet(self._failure, self._loss, self._alike, there)
        assert piece is not None
        if sums is None:
            raise ScriptError(
                f"the ranks have read different samples for step {self._step + 1}: let the script "
                "give every rank the same data in the same order (seed what it draws; no "
                "DistributedSampler: ranks divide each mini-batch themselves)"
            )
        self._alike, planned = 0, piece.planned
        if planned.round.mode is RoundMode.EVAL:
            return planned.ends_epoch and await self._evaluation_over(planned.round.step)
        self._begins_epoch = planned.ends_epoch
        self._update(piece, sums[0], dict(zip(self._order, sums[1:], strict=True)))
        stops = await self._callbacks_done()
        if not (planned.ends_epoch and self._prepared.evaluation is not None) or stops:
            await self._checkpoint(ends_epoch=planned.ends_epoch)
        return stops

    def _update(self, piece: LoadedMicroBatch, loss: float, users: dict[str, float]) -> None:
        shape, live, prepared = piece.planned.round, self._live, self._prepared
        weights = piece.feed.weights
        counts_nothing = weights is not None and weights.counts_nothing
        if counts_nothing:
            self._warn(f"the mini-batch of step {shape.step + 1} counts nothing: no gradient")
        with self._ranks.together():
            numbers = prepared.numbers_of(shape.step)
        clip, skips = self._job.clip_grad_norm, self._job.skip_nonfinite
        order = RoundOrder(
            shape, numbers, clip=clip or 0.0, leaves_out=skips, counts_nothing=counts_nothing
        )
        self._sum_up(users)
        broken = live.broken(order, None)
        live.get_ready(order)
        coefficient: Coefficient | None = None
        norm: float | None = None
        if broken is not None or not math.isfinite(loss):
            coefficient = LEFT_OUT
        elif clip is not None:
            coefficient, norm = self._clipped(clip)
        live.apply(coefficient)
        if coefficient == LEFT_OUT and not skips:
            said = f"the loss became {loss} at step {shape.step + 1}"
            if broken is not None:
                units = len(self._description.units)
                said = str(broken_update(broken, shape.step + 1, self._description, 0, units))
            self._end_before(said)
        self._report(shape, loss, coefficient, self._job.numbers.rates(numbers), norm)

    def _sum_up(self, users: dict[str, float]) -> None:
        """Of all ranks: gradients, where any has one, and terms of running statistics."""
        if self._ranks.world == 1:
            return
        parameters, statistics = self._live.optimizer.parameters, self._live.stage.statistics
        summed = [_dense_gradient(parameters[name]) for name in self._order if users[name]]
        if statistics is not None:
            summed += statistics.sums.values()
        self._ranks.add_up(summed)

    def _clipped(self, clip: float) -> tuple[Coefficient, float]:
        gradients = self._live.optimizer.gradients()
        norms = [
            *cross_stage_gradients.tensor_norms({n: gradients[n] for n in self._order}).values()
        ]
        coefficient = cross_stage_gradients.clip_coefficient(norms, clip)
        return cross_stage_gradients.to_number(coefficient), float(
            cross_stage_gradients.total_norm(norms)
        )

    def _report(
        self,
        shape: Round,
        loss: float,
        coefficient: Coefficient | None,
        rates: tuple[float, ...],
        norm: float | None,
    ) -> None:
        self._step = step = shape.step + 1
        self._samples += shape.samples
        if coefficient == LEFT_OUT:
            self._left_out += 1
            self._warn(
                f"step {step} has NaN or infinite values: it is skipped, and training goes on"
            )
        now = monotonic()
        seconds, self._stepped_at = now - self._stepped_at, now
        speed = rate(shape.samples, seconds)
        self._emit(Step(step, loss, speed, seconds, rates[0] if rates else None, rates, norm))

    def _end_before(self, said: str) -> None:
        """Raises TrainingError; the weights before that update are written."""
        out = self._options.out
        with self._ranks.together():
            self._bring_home()
            if out is not None:
                self._write(out)
        place = "The model" if out is None else str(out)
        raise TrainingError(
            f"{said}. {_ADVICE}. {place} has the weights of step {self._step}, the last good one"
        )

    # -- between rounds, on rank 0 ---------------------------------------------------------------

    def _evaluate(self, piece: LoadedMicroBatch) -> None:
        shape, feed, captured = piece.planned.round, piece.feed, self._prepared.captured
        if self._evaluating is None:
            values = MetricValues(self._job.metrics, self._prepared.over_all)
            self._evaluating = EvaluationSums(values)
        live, device = self._live, self._device
        inputs, targets = (
            [device.copy_in(t) for t in some] for some in (feed.inputs, feed.targets)
        )
        averages = live.optimizer.averages() if self._job.eval_with_ema else None
        number = feed.piece.key.micro_batch
        try:
            outputs = live.stage.evaluate(inputs, targets, instead=averages)
        except OPERATORS_RAISE as error:
            raise _named(error, shape, number) from error
        loss, *leaves = [t for t in device.fetched(outputs) if t is not None]
        self._loss += loss.item() * feed.piece.size / shape.samples
        is_last = number == shape.micro_batches - 1
        if is_last:
            self._evaluating.add(self._loss, shape.samples)
        if self._job.metrics:
            output, size = captured.unflatten_output(leaves), feed.piece.size
            self._evaluating.values.add(output, piece.target, size, ends_batch=is_last)

    async def _evaluation_over(self, step: int) -> bool:
        """As `_round_over`."""
        numbers, name = self._job.numbers, self._job.scheduler_metric
        found: dict[str, float] = {}
        with self._ranks.together():
            if self._evaluating is not None:
                evaluated, self._evaluating = self._evaluating, None
                unscored = self._prepared.captured.unscored
                found = evaluated.values.result(None if unscored else evaluated.loss)
                for metric, how in evaluated.values.failures.items():
                    self._warn(f"the metric {metric!r} failed, and is left out: {how}")
                if numbers.needs_metric and name not in found:
                    raise ScriptError(f"the scheduler waits for the metric {name!r}: step {step}")
        found = self._ranks.shared(found)
        if numbers.needs_metric:
            numbers.note(step, found[name])
        self._evaluated = step
        self._emit(Eval(step, found))
        stops = await self._callbacks_done()
        await self._checkpoint(ends_epoch=True)
        self._stepped_at = monotonic()
        return stops

    async def _callbacks_done(self) -> bool:
        """Whether one of them ends the job; on every rank."""
        if not self._job.callbacks:
            return False
        numbers, runner = self._job.numbers, self._runner
        with self._ranks.together():
            await runner.caught_up()
            for best in runner.due():
                state = split_state(self._on_host())[0]
                if self._job.eval_with_ema:
                    state |= self._averages()
                save_weights(best.path, self._prepared.captured.state_dict(state))
            while wanting := runner.wanting:
                await self._give_state(wanting[0])
        for step, metric in self._ranks.shared(numbers.measured):
            numbers.note(step, metric)
        return self._ranks.agree(wish=runner.stopped is not None)

    async def _give_state(self, callback: StateCallback) -> None:
        model, optimizer = split_state(self._on_host())
        checkpoint = Checkpoint(self._prepared.progress(self._step), model, optimizer)
        write = None
        if callback.wanted is WantedState.ALL:

            def write(folder: Path) -> None:
                save(folder, checkpoint)

        weights = self._prepared.captured.state_dict(model)
        await self._runner.give(callback, TrainedState(self._step, weights, write))
        if self._job.numbers.needs_metric and callback.measured is not None:
            self._job.numbers.note(self._step, callback.measured)
        found, callback.evaluated = callback.evaluated, None
        if found is not None:
            self._emit(Eval(self._step, found))
            await self._runner.caught_up()

    async def _checkpoint(self, *, ends_epoch: bool) -> None:
        folder, now = self._options.checkpoint, monotonic()
        if folder is None or not self._cadence.wants(self._step, ends_epoch=ends_epoch, now=now):
            return
        progress = replace(self._prepared.progress(self._step), evaluated=self._evaluated)
        model, optimizer = split_state(self._on_host())
        try:
            await run_in_background(partial(save, folder, Checkpoint(progress, model, optimizer)))
        except TrainingError as error:
            self._warn(str(error))
        self._cadence.taken(monotonic() - now, monotonic())

    # -- state -----------------------------------------------------------------------------------

    def _on_host(self) -> dict[str, Tensor]:
        return dict(self._live.on_host(self._live.present()))

    def _averages(self) -> dict[str, Tensor]:
        averages = self._live.optimizer.averages()
        tensors = self._device.fetched([*averages.values()])
        return {n: t for n, t in zip(averages, tensors, strict=True) if t is not None}

    def _bring_home(self) -> None:
        self._prepared.captured.load_state(split_state(self._on_host())[0])

    def _write(self, out: Path) -> None:
        state = self._job.model.state_dict().items()
        save_weights(out, {name: value for name, value in state if isinstance(value, Tensor)})
        if self._job.ema is not None:
            save_weights(average_path(out), self._prepared.captured.state_dict(self._averages()))

    def _warn(self, message: str) -> None:
        self._emit(events.Warning(message))


def _shares(micro_batches: int, world: int) -> tuple[int, ...]:
    """How many of them each rank takes."""
    least, more = divmod(micro_batches, world)
    return tuple(least + (rank < more) for rank in range(world))


def _dense_gradient(parameter: Parameter) -> Tensor:
    """The gradient of a parameter of which some rank has one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout is not torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _mixed(alike: int, feed: FeedItem) -> int:
    """A number of what has been read, below the limit."""
    digest = hashlib.sha256(str(alike).encode())
    for tensor in (*feed.inputs, *feed.targets):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:4], "big") % _ALIKE_LIMIT


def _named(error: Exception, shape: Round, number: int) -> Exception:
    """The same error in words that say where, if that is known."""
    unit = failing_unit(error)
    return error if unit is None else OperatorFailed(refused(error, unit, shape, number))
