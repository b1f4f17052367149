"""The rounds of one generation, driven from the holder: order, feed, collect, report.

Synchronous training has two rounds under way at most: while the stages finish one, the first
micro-batches of the next already wait at the first stage.

Asynchronous training only orders and feeds; an update is made before it counts:

    order t, t+1, ... ──► stages, each by itself ──► "update t is made" from all: step t + 1

A step counts once every stage has made its update. Only then it is reported, and only then the
stages at version t + 1 can be resumed from.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from time import monotonic

from torch import Tensor

from p2ptrain.aio.tasks import run_in_background, task_scope
from p2ptrain.holder.input.batch_layout import NewSize
from p2ptrain.holder.input.data_watch import DataWatch
from p2ptrain.holder.input.loader import FeedItem, LoadedMicroBatch, LongerThanPlanned
from p2ptrain.holder.input.metrics import MetricValues, check_measured
from p2ptrain.holder.input.micro_batch_weights import token_place
from p2ptrain.holder.input.mini_batches import MiniBatch
from p2ptrain.holder.planning.replan_watcher import ReplanWatcher
from p2ptrain.holder.reports import JobReports
from p2ptrain.holder.rounds.callback_runner import CallbackRunner
from p2ptrain.holder.rounds.generation import HolderGeneration
from p2ptrain.holder.rounds.late_batches import LateBatches
from p2ptrain.holder.rounds.pause import JobPause
from p2ptrain.holder.rounds.round_results import LossWatch
from p2ptrain.holder.rounds.trained_weights import TrainedWeights
from p2ptrain.holder.snapshots.checkpointer import Checkpointer
from p2ptrain.holder.snapshots.snapshot_manager import SnapshotManager
from p2ptrain.holder.start.journal import Journal
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.callbacks import StateCallback
from p2ptrain.job.rounds import (
    LENGTHS_ROOM,
    LENGTHS_SLACK,
    PlannedRound,
    Round,
    RoundMode,
    RoundSequence,
)
from p2ptrain.messages.round_orders import Commit, RoundOrder, RoundReport
from p2ptrain.messages.tensors import MicroBatchKey
from p2ptrain.model.stage.optimizer_form import AS_GIVEN
from p2ptrain.model.stage.random_operators import randomness_lock
from p2ptrain.recovery.commit import AS_IT_IS, LEFT_OUT, SKIPPED, Seat
from p2ptrain.recovery.loss_scale import LEAST_SCALE, MANY_SKIPPED, LossScale
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.asynchronous.async_executor import orders_under_way
from p2ptrain.runtime.io.sample_division import SampleDivision

ROUNDS_AHEAD = 2

FOUND_AHEAD = 64
"""Rounds whose samples are on their way and that are not ordered yet."""


class StoppedEarly(Exception):  # it is none
    """A callback has ended the job while the stages compute the mini-batch that came next."""


class TrainingLoop:
    """Runs a course of rounds on one generation.

    Args:
        start: updates applied to the state that the generation begins with.
        evaluated: evaluations up to this step are left out.
        reports: receives what counts, perhaps again after a generation that has ended.
        replan_watcher: receives the times of rounds.
        copies: says which versions are kept to go back to.
        counts: is called with the updates that count, once each does.
        callbacks: are waited for: an update counts once they have seen the one before.
        weights: those that the stages have, for callbacks that want them.
        journal: has what a scheduler has seen of evaluations, and how the loss scale changed.
        lengthen: has another plan made, for batches of such lengths.
        pause: a person's.

    Attributes:
        new_size: of the batch before which `run` has ended, as the model is not captured for it.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        course: RoundSequence,
        generation: HolderGeneration,
        checkpointer: Checkpointer | None,
        reports: JobReports,
        replan_watcher: ReplanWatcher,
        copies: SnapshotManager,
        counts: Callable[[int], None],
        callbacks: CallbackRunner,
        weights: TrainedWeights,
        journal: Journal,
        lengthen: Callable[[tuple[int, ...]], None],
        pause: JobPause,
        *,
        start: int,
        evaluated: int,
    ) -> None:
        self._prepared = prepared
        self._start, self._evaluated = start, evaluated
        self._course = course
        self._generation = generation
        self._checkpointer = checkpointer
        self._reports = reports
        self._replan_watcher = replan_watcher
        self._copies = copies
        self._counts = counts
        self._callbacks, self._weights = callbacks, weights
        self._may_order = asyncio.Event()  # but for callbacks that work with what came before
        self._was_stopped = callbacks.stopped is not None  # then the course ends with that
        self._journal, self._lengthen = journal, lengthen
        self._pause = pause
        self._scale = prepared.loss_scale
        assignment = generation.assignment
        # without a barrier: mini-batches that the stages must know of, to end one
        self._depth = None if assignment.asynchrony is None else orders_under_way(assignment.depths)
        self._loss_watch = LossWatch(assignment.depths[0])
        self._ahead = asyncio.Semaphore(self._rounds_ahead)
        self._found: asyncio.Queue[tuple[PlannedRound[MiniBatch], bool] | None] = asyncio.Queue(
            FOUND_AHEAD
        )
        self._ordered: asyncio.Queue[tuple[RoundOrder, PlannedRound[MiniBatch]] | None] = (
            asyncio.Queue(self._rounds_ahead + 1)
        )
        self._shapes: deque[Round] = deque(maxlen=2 * self._rounds_ahead + 2)
        self._is_complete = False  # there is an order for every round
        self.new_size: NewSize | None = None
        self._targets: asyncio.Queue[tuple[MicroBatchKey, object]] = asyncio.Queue(
            generation.evaluated_ahead
        )
        self._evaluation: MetricValues | None = None
        self._data_watch = DataWatch()
        self._stepped_at: float | None = None
        self._token_place = token_place(prepared.captured.description)
        self._tokens: defaultdict[int, int] = defaultdict(int)  # by round
        last = generation.assignment.stages[-1]
        self._division = SampleDivision(last)
        self._late = LateBatches(prepared, last, reports.warn)

    @property
    def _rounds_ahead(self) -> int:
        """Rounds that may be under way; a round's scale follows from how the one before ended."""
        if self._depth is not None:
            return self._depth
        return ROUNDS_AHEAD if self._scale is None else 1

    async def run(self) -> bool:
        """Run every round, or until the generation is drained; returns whether every one was run.

        Or until a batch is of a new size.

        Raises what failed first, here or on any device.

        Raises:
            StoppedEarly: a callback has ended the job; rounds that were ordered do not count.
        """
        if self._checkpointer is not None:
            self._checkpointer.begin()
        await self._generation.reach("replay.first", self._start)
        async with task_scope() as group:
            working = [
                group.create_task(self._generation.tracker.failed()),
                group.create_task(self._order_rounds()),
                group.create_task(self._generation.feeder.run(self._feeds())),
            ]
            is_done = await self._gather_rounds()
            for task in working:
                task.cancel()
        return is_done

    # -- out -------------------------------------------------------------------------------------

    async def _order_rounds(self) -> None:
        ordered = 0
        while (found := await self._found.get()) is not None:
            planned, counts_nothing = found
            shape = planned.round
            if not ordered:  # a scheduler is stepped as often as it was before
                await run_in_background(partial(self._prepared.numbers_of, shape.step))
            await self._ahead.acquire()
            await self._may_order.wait()
            await self._while_paused()
            if self._generation.draining.is_set() or self._is_stopped:
                await self._no_more(ordered)
                return
            trains = shape.mode is RoundMode.TRAIN
            order = RoundOrder(
                shape,
                numbers=self._prepared.numbers_of(shape.step) if trains else AS_GIVEN,
                outputs=shape.mode is RoundMode.EVAL and bool(self._prepared.job.metrics),
                clip=self._prepared.job.clip_grad_norm or 0.0,
                leaves_out=self._prepared.job.skip_nonfinite,
                averaged=shape.mode is RoundMode.EVAL and self._prepared.job.eval_with_ema,
                counts_nothing=counts_nothing,
                scale=self._scale.of(shape.step) if trains and self._scale is not None else 0.0,
            )
            if counts_nothing:
                self._reports.counts_nothing(shape.step + 1)
            if await self._keep(planned):
                order = self._copies.ordered(order)
            if self._stands_still(planned):
                self._may_order.clear()
            self._shapes.append(shape)
            await self._generation.order(order)
            await self._ordered.put((order, planned))
            ordered += 1
        self._is_complete = self.new_size is None
        await self._no_more(ordered)

    async def _while_paused(self) -> None:
        """Order nothing while a person has paused the job."""
        pause = self._pause
        if not pause.is_on:
            return
        await pause.wait(self._generation.draining)
        self._stepped_at = None
        self._reports.pause_over(pause.began_at)
        self._replan_watcher.pause_over()
        self._copies.pause_over()

    def round_of(self, step: int) -> Round | None:
        """The round that makes update `step`, from 1, if it was ordered lately."""
        found = (r for r in self._shapes if r.mode is RoundMode.TRAIN and r.step == step - 1)
        return next(found, None)

    def _stands_still(self, planned: PlannedRound[MiniBatch]) -> bool:
        """Whether what comes after a round is ordered once the callbacks have worked with it."""
        if planned.round.mode is RoundMode.EVAL:
            waits = self._callbacks.has_any or self._prepared.job.numbers.needs_metric
            return planned.ends_epoch and waits
        return self._callbacks.stands_still_after(planned.round.step + 1)

    async def _no_more(self, rounds: int) -> None:
        """So many were ordered in this generation; with a barrier each ends by itself."""
        if self._depth is not None:
            await self._generation.no_more(rounds)
        await self._ordered.put(None)

    async def _keep(self, planned: PlannedRound[MiniBatch]) -> bool:
        shape = planned.round
        if shape.mode is not RoundMode.TRAIN:
            return False
        step, checkpointer = shape.step + 1, self._checkpointer
        if checkpointer is not None and await self._wants_checkpoint(checkpointer, planned):
            return True
        return not planned.is_last and self._copies.wants(step)

    async def _wants_checkpoint(
        self, checkpointer: Checkpointer, planned: PlannedRound[MiniBatch]
    ) -> bool:
        """Whether the version after that round is written.

        Without a barrier not where one would have to wait for another. Without orders the stages
        stand still: to end a mini-batch they must know what comes, as many as there are stages
        after it. So of those that must be written too close to each other, such as the borders of
        very short epochs, the first one is.
        """
        due = checkpointer.due
        if (
            self._depth is not None
            and due is not None
            and planned.round.step + 1 - due < self._depth
        ):
            return False
        return await checkpointer.wants(planned.round.step + 1, ends_epoch=planned.ends_epoch)

    async def _feeds(self) -> AsyncGenerator[FeedItem, None]:
        room = self._generation.assignment.longest
        longest = [int(LENGTHS_SLACK * length / LENGTHS_ROOM) for length in room]
        loader = self._prepared.loader(self._slices, longest)
        course = loader.course(self._course, self._start, self._evaluated)
        try:
            async with aclosing(self._read(course)) as feeds:
                async for feed in feeds:
                    yield feed
        except LongerThanPlanned as found:
            self._generation.draining.set()
            self._lengthen(found.planned.round.lengths)
            await self._found.put((found.planned, False))  # and is not ordered
            return
        except NewSize as found:
            self.new_size = found
        await self._found.put(None)

    async def _read(
        self, course: AsyncGenerator[LoadedMicroBatch, None]
    ) -> AsyncGenerator[FeedItem, None]:
        last = -1
        async with aclosing(course) as pieces:
            asked_at = monotonic()
            async for loaded in pieces:
                if last < 0:
                    self._reports.resumed()
                else:
                    self._data_watch.waited(monotonic() - asked_at)
                if loaded.planned.round.index > last:
                    last = loaded.planned.round.index
                    self._late.check_whole(loaded.planned.round)
                    weights = loaded.feed.weights
                    is_nothing = weights is not None and weights.counts_nothing
                    await self._found.put((loaded.planned, is_nothing))
                self._count_tokens(loaded.feed)
                await self._keep_target(loaded)
                self._late.check_ignored(loaded.feed)
                yield loaded.feed
                asked_at = monotonic()

    def _count_tokens(self, feed: FeedItem) -> None:
        if self._token_place is not None and feed.piece.mode is RoundMode.TRAIN:
            self._tokens[feed.piece.key.round] += feed.inputs[self._token_place].numel()

    def _slices(self, number: int, size: int) -> list[tuple[int, int]]:
        return [(part.first, part.end) for part in self._division.slices(number, size)]

    async def _keep_target(self, loaded: LoadedMicroBatch) -> None:
        """Metrics need it when the output is back; the queue bounds the pieces under way."""
        if loaded.feed.piece.mode is RoundMode.EVAL and self._prepared.job.metrics:
            await self._targets.put((loaded.feed.piece.key, loaded.target))

    # -- in --------------------------------------------------------------------------------------

    async def _gather_rounds(self) -> bool:
        """Returns whether there was an order for every round."""
        await self._give_state(self._start)  # the generation before may have ended before that
        while (ordered := await self._ordered.get()) is not None:
            order, planned = ordered
            if order.round.mode is RoundMode.TRAIN:
                await self._finish_step(order)
                await self._warn_of_outdated(order.round.step + 1, is_last=planned.is_last)
                if self._stands_still(planned):
                    await self._give_state(order.round.step + 1)
            else:
                await self._finish_evaluation(order, is_last=planned.ends_epoch)
            self._ahead.release()
        if not self._is_complete:
            await self._generation.settle()
        await self._callbacks.caught_up()
        is_done = self._is_complete
        if self._is_stopped:
            self._end_after(self._reports.reported.step)
            is_done = True
        if is_done and self._checkpointer is not None:
            await self._checkpointer.idle()
        return is_done

    @property
    def _is_stopped(self) -> bool:
        """Whether a callback has ended the job, since this generation began."""
        return self._callbacks.stopped is not None and not self._was_stopped

    def _end_after(self, step: int) -> None:
        """Raises StoppedEarly: the evaluation at the end is missing."""
        self._callbacks.stop_after(step)
        if self._prepared.evaluation is not None and self._reports.reported.evaluated < step:
            raise StoppedEarly

    async def _finish_step(self, order: RoundOrder) -> None:
        reports = await self._generation.tracker.complete(order.round.index)
        if self._depth is not None:
            # The update is made already: a callback that ends the job ends it after those made.
            await self._callbacks.caught_up()
            step = order.round.step + 1
            self._step(step, order, reports)
            if warning := self._loss_watch.note(step, loss_of(reports)):
                self._reports.warn(warning)
            self._round_over(step, reports)
            return
        coefficient = await self._generation.coefficient(order.round)
        is_left_out = False
        if order.leaves_out:
            is_left_out = not all(report.finite for report in reports.values())
            coefficient = LEFT_OUT if is_left_out else coefficient or AS_IT_IS
        elif self._scale is not None:
            is_skipped = not all(report.finite for report in reports.values())
            coefficient = SKIPPED if is_skipped else coefficient or AS_IT_IS
            await self._rescale(self._scale, order.round.step + 1, is_skipped=is_skipped)
        await self._callbacks.caught_up()
        if self._is_stopped:
            self._callbacks.stop_after(order.round.step)
            raise StoppedEarly
        await self._generation.reach("decide.before", order.round.step)
        # Every stage is ready: the update counts from here on, whatever fails. Between this and the
        # first commit nothing is awaited, so that no step counts without being reported.
        step = order.round.step + 1
        if is_left_out:
            self._reports.left_out(step)
        self._step(step, order, reports)
        await self._generation.reach("report.after", order.round.step)
        await self._generation.commit(Commit(order.round.index, order.round.step, coefficient))
        self._round_over(step, reports)

    async def _rescale(self, scale: LossScale, step: int, *, is_skipped: bool) -> None:
        if not scale.decided(step, skipped=is_skipped):
            return
        await self._journal.scaled(scale.rows)
        if is_skipped and scale.skipped_in_a_row == MANY_SKIPPED:
            self._reports.warn(
                f"the last {MANY_SKIPPED} updates were skipped: in float16 their gradients are "
                f"infinite or NaN, the last time with a loss scale of {scale.of(step - 1):g}. If "
                f"that goes on below {LEAST_SCALE:g}, the job ends. Try autocast=torch.bfloat16"
            )

    def _step(self, step: int, order: RoundOrder, reports: Mapping[Seat, RoundReport]) -> None:
        """So many updates count."""
        norm = self._generation.gradient_norm if self._depth is None else None
        rates = self._prepared.job.numbers.rates(order.numbers)
        scale, tokens = order.scale or None, self._tokens.pop(order.round.index, 0)
        self._reports.step(step, loss_of(reports), order.round.samples, rates, norm, scale, tokens)
        self._counts(step)
        self._copies.round_done(step)

    def _round_over(self, step: int, reports: Mapping[Seat, RoundReport]) -> None:
        busy = {seat: report.busy for seat, report in reports.items()}
        self._watch_data(max((span.wall for span in busy.values()), default=0.0))
        self._replan_watcher.busy(busy, copying=self._copies.have_travelled)
        self._take_checkpoint(step)

    async def _warn_of_outdated(self, step: int, *, is_last: bool) -> None:
        """After 1, 2, 4, 8 updates and so on, and after the last."""
        if step & (step - 1) and not is_last:
            return
        if names := await run_in_background(self._prepared.outdated.news):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            self._reports.warn(
                f"{', '.join(map(repr, names[:3]))}{more} changed after the model was captured, "
                "and the devices compute with what it was then. If forward() or the loss reads it, "
                "this is not what plain torch trains: keep it in a buffer that forward() writes "
                "in place, or let it come with each sample"
            )

    def _watch_data(self, busy_seconds: float) -> None:
        """Name data that is slower than training, once in a job."""
        now = monotonic()
        if self._stepped_at is not None:
            self._data_watch.stepped(now - self._stepped_at, busy_seconds)
        self._stepped_at = now
        share = self._data_watch.share()
        if share is not None and not self._reports.has_named_data:
            self._reports.has_named_data = True
            self._reports.warn(
                f"waiting for data {share:.0%} of the time: "
                f"{self._prepared.batches.faster(self._data_watch, share)}"
            )

    def _take_checkpoint(self, step: int) -> None:
        if self._checkpointer is not None and self._checkpointer.is_due(step):
            self._checkpointer.take(Version(step, self._generation.assignment.key.generation))

    async def _finish_evaluation(self, order: RoundOrder, *, is_last: bool) -> None:
        """Of one round of it; the last one of an evaluation has the numbers."""
        shape, prepared = order.round, self._prepared
        if self._evaluation is None:
            self._evaluation = MetricValues(prepared.job.metrics, prepared.over_all)
        evaluation = self._evaluation
        if order.outputs:
            for number in range(shape.micro_batches):
                await self._measure(evaluation, shape, number)
        reports = await self._generation.tracker.complete(shape.index)
        evaluation.add_loss(loss_of(reports), shape.samples)
        if not is_last:
            return
        self._evaluation = None
        self._stepped_at = None
        has_loss = not prepared.captured.unscored
        found = await run_in_background(partial(evaluation.result, has_loss=has_loss))
        check_measured(prepared.job, shape.step, found)
        await self._note_measured(shape.step, found.get(prepared.job.scheduler_metric))
        self._reports.evaluation(shape.step, found)
        self._replan_watcher.pause_over()
        for failure in evaluation.said:
            self._reports.warn(failure)
        if self._checkpointer is not None:
            self._checkpointer.evaluated(shape.step)
        await self._await_callbacks()
        self._may_order.set()
        self._copies.pause_over()

    async def _await_callbacks(self) -> None:
        """Once they have seen an evaluation, training continues; the stages wait till then."""
        if not self._callbacks.has_any:
            return
        await self._callbacks.caught_up()
        for best in self._callbacks.due():
            await self._weights.save_best(self._generation, best)
        await run_in_background(self._callbacks.keep)

    async def _note_measured(self, step: int, metric: float | None) -> None:
        """Where the scheduler is stepped with it; the journal has it before the next update."""
        numbers = self._prepared.job.numbers
        if numbers.needs_metric and metric is not None:
            numbers.note(step, metric)
            await self._journal.measured(numbers.measured)

    async def _report_evaluated(self, step: int, callback: StateCallback) -> None:
        """What a callback has found, for the user and for the other callbacks."""
        found, callback.evaluated = callback.evaluated, None
        if found is not None:
            self._reports.evaluation(step, found)
            await self._await_callbacks()

    async def _give_state(self, step: int) -> None:
        """To callbacks that want it; the stages stand still until they have worked with it.

        Not of a step that is computed again on the way to the one that they have seen.
        """
        await self._callbacks.caught_up()
        if step == self._reports.reported.step:
            while wanting := self._callbacks.wanting:  # again after what it was given
                state = await self._weights.state(self._generation, step, wanting[0].wanted)
                await self._callbacks.give(wanting[0], state)
                await self._note_measured(step, wanting[0].measured)
                await self._report_evaluated(step, wanting[0])
        self._may_order.set()

    async def _measure(self, evaluation: MetricValues, shape: Round, number: int) -> None:
        key, target = await self._targets.get()
        assert key == MicroBatchKey(shape.index, number), "pieces are fed and evaluated in order"
        leaves = await self._generation.output(key)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ends_batch = number == shape.micro_batches - 1

        def measure() -> None:
            with randomness_lock:  # a metric may draw random numbers, and so may what computes
                output = self._prepared.captured.unflatten_output(tensors)
                evaluation.add(output, target, shape.size(number), ends_batch=ends_batch)

        await run_in_background(measure)  # a slow one would silence this device's event loop


def loss_of(reports: Mapping[Seat, RoundReport]) -> float:
    """The sum of what the last stage's devices had of it; the others report zero."""
    return sum(reports[seat].loss for seat in sorted(reports))
