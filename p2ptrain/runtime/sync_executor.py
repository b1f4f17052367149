"""Runs one stage's schedule (1F1B) on this device, round after round.

    tensor receivers      schedule             output queues
    activations --+                          +--> activations to stage p+1
    targets ------+--> forward / backward ---+--> gradients  to stage p-1
    gradients ----+         |                +--> done, losses to the holder
                       all-reduce in the group, begun during the last backward
    commit ------------> one update

An update counts once the holder commits it, because all devices have their gradients: so no device
is more than one update ahead of another (`recovery.commit`). `OptimizerStep` makes optimistic and
overlapped updates where the plan has memory for them.

Where the plan splits the backward, weight gradients are computed while an input is awaited, and
the rest before the stage is done (`plan.types.schedule.ZeroBubble`). In a group each device does
those tasks of the stage's order in which it has a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from torch import Tensor

from p2ptrain.aio.tasks import task_scope
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import Commit, RoundOrder
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice
from p2ptrain.model.stage.finite import Broken
from p2ptrain.plan.types.schedule import ScheduleAction, ZeroBubble, one_f_one_b
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.runtime.executor import StageExecutor, StageSpec, Weighed
from p2ptrain.runtime.io.replay_log import ReplayLog
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.not_finite import MicroBatchNotFinite, broken_update
from p2ptrain.runtime.optimizer_step import OptimizerStep, OverlappedUpdate
from p2ptrain.runtime.spans import NONE
from p2ptrain.runtime.stage_io import StageIo, StageSender
from p2ptrain.state.snapshot_store import SnapshotStore


@dataclass(frozen=True, slots=True)
class _OverlappedRound:
    """A round whose backwards are over while its sums still arrive.

    Attributes:
        loss: this device's part of it.
    """

    order: RoundOrder
    loss: float


class SyncStageExecutor(StageExecutor):
    """One stage on this device, for one generation of synchronous rounds.

    Attributes:
        live: its tensors.
        update: the second half of its rounds.
    """

    def __init__(
        self,
        task: StageSpec,
        live: LiveStage,
        links: StageSender,
        io: StageIo,
        compute: ComputeThread,
        store: SnapshotStore,
        log: ReplayLog | None = None,
    ) -> None:
        """`log`: of what it sends; None = it is never replayed."""
        super().__init__(task, live, links, io, compute, log)
        self.live = live
        self._orders: asyncio.Queue[RoundOrder] = asyncio.Queue(maxsize=4)
        self.update = OptimizerStep(
            *(live, self._run_update, store),
            device=task.device,
            stage=task.index,
            keeps=task.keeps,
            goes_ahead=task.goes_ahead,
            spans=io.spans,
        )
        self._reads_losses_late = not self._device.is_host
        self._is_first = True
        self._micro_batches = 0  # of this round
        self._is_saved = False  # what the forwards of this round write
        self._next: RoundOrder | None = None  # taken from the queue, not begun
        self._trailing: _OverlappedRound | None = None

    async def run(self) -> None:
        """Serve rounds, and let optimistic updates count."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.update.run())
            group.create_task(super().run())

    async def order(self, order: RoundOrder) -> None:
        """Queue a round; the holder keeps at most two ahead."""
        await self._orders.put(order)

    def commit(self, commit: Commit) -> None:
        """The update that this stage is ready for counts; see `OptimizerStep.commit`."""
        self.update.commit(commit)

    async def _serve(self) -> None:
        while True:
            began = perf_counter()
            order, self._next = self._next or await self._orders.get(), None
            self.round = order.round.index
            self._note_wait("wait order", began)
            if order.round.mode is RoundMode.TRAIN:
                await self._train(order)
            else:
                await self._report(order, await self._evaluate(order))

    # -- training --------------------------------------------------------------------------------

    async def _train(self, order: RoundOrder) -> None:
        if self._io.reduction is not None and self._trailing is None:
            self._io.reduction.begin(order)
        self._micro_batches, self._is_saved = order.round.micro_batches, False
        if self.task.held is None or next(self.task.pieces(order.round), None) is None:
            loss = await self._in_strict_order(order)
        else:
            loss = await self._in_two_parts(order, self.task.held)
        loss += await self._late_losses_of(order)
        if self._trailing is not None:  # this device has no part in the round
            await self._end_trailing(order, asyncio.Event())
        if not self._is_saved:
            await self._run((0, self.task.index), self._save)
        if await self._trails(order):
            self._trailing = _OverlappedRound(order, loss)
            return
        say_done = partial(self._report, order, loss)
        if await self._complete(order):
            await self.update.end(order, say_done)
        else:
            await self.update.make(order, say_done)

    async def _late_losses_of(self, order: RoundOrder) -> float:
        try:
            return await self._read_late_losses(order)
        except MicroBatchNotFinite:
            await self.update.counted()  # the update before it is reported first
            raise

    async def _trails(self, order: RoundOrder) -> bool:
        """Whether the next round begins before this one's sums are there; its update then has."""
        reduction = self._io.reduction
        may_trail = self.task.trails and self.update.goes_ahead and self._device.is_host
        if reduction is None or not may_trail or order.may_change_nothing:
            return False
        reduction.all_final()
        if self._is_first or self._orders.empty():
            return False
        self._next = self._orders.get_nowait()
        return self._next.round.mode is RoundMode.TRAIN and await self.update.begin(order)

    async def _end_trailing(self, following: RoundOrder, summed: asyncio.Event) -> None:
        """Wait for the sums that trail, and say that the round which they are of is done.

        `summed`: set once they are there.
        """
        reduction, trailing = self._io.reduction, self._trailing
        assert reduction is not None
        assert trailing is not None
        self.waits_for_group, began = True, perf_counter()
        await reduction.finish()
        self.waits_for_group = False
        self._note_wait("wait sum", began)
        await self._check(trailing.order)
        reduction.begin(following)
        summed.set()
        await self.update.end(trailing.order, partial(self._report, trailing.order, trailing.loss))
        self._trailing = None

    async def _in_strict_order(self, order: RoundOrder) -> float:
        loss = 0.0
        actions = list(self._own_actions(order.round))
        for number, (action, piece) in enumerate(actions):
            if action.kind == "forward":
                loss += await self._forward(order, piece)
            else:
                final = self._final() if number == len(actions) - 1 else None
                await self._whole_backward(order, piece, final)
        return loss

    async def _whole_backward(
        self, order: RoundOrder, piece: MicroBatchSlice, final: Callable[[str], None] | None
    ) -> None:
        """`final` receives the complete gradients, in the last backward of a round."""
        backward = partial(self.live.stage.backward, final=final)
        await self._backward(order, piece, backward)

    async def _in_two_parts(self, order: RoundOrder, held: int) -> float:
        loss = 0.0
        pieces = {piece.key.micro_batch: piece for piece in self.task.pieces(order.round)}
        schedule = ZeroBubble([action for action, _ in self._own_actions(order.round)], held)

        def is_ready(action: ScheduleAction) -> bool:
            return self._has_inputs(action, pieces[action.micro_batch].key)

        while (action := schedule.next(is_ready)) is not None:
            piece = pieces[action.micro_batch]
            if action.kind == "forward":
                loss += await self._forward(order, piece)
            elif action.kind == "backward":
                await self._backward(order, piece, self.live.stage.backward_inputs)
            else:
                await self._weights(order, action.micro_batch)
        await self._weights(order, *schedule.pending, final=self._final())
        return loss

    def _has_inputs(self, action: ScheduleAction, key: MicroBatchKey) -> bool:
        io = self._io
        if action.kind == "backward":
            needed = (io.gradients, *(one.later for one in io.tied))
            return all(receiver is None or receiver.has(key) for receiver in needed)
        return io.activations.has(key) and (not self.task.uses_targets or io.targets.has(key))

    def _own_actions(self, shape: Round) -> Iterator[tuple[ScheduleAction, MicroBatchSlice]]:
        """The stage's order without the micro-batches in which this device has no part."""
        warmup = min(self.task.warmup, shape.micro_batches)  # a batch may have fewer than planned
        for action in one_f_one_b(shape.micro_batches, warmup):
            piece = self.task.piece(shape, action.micro_batch)
            if piece is not None:
                yield action, piece

    async def _forward(self, order: RoundOrder, piece: MicroBatchSlice) -> float:
        """Returns this part of the round's loss at the last stage, 0.0 elsewhere."""
        forward = partial(
            self.live.stage.forward,
            piece.key.micro_batch,
            seed=(self.task.seed, order.round.step, _draw(piece)),
            share=piece.samples / piece.size,
            scale=order.scale,
            split=self.task.held is not None,
        )
        try:
            if self._trailing is not None:
                return await self._trailing_forward(order, piece, forward)
            return await self._compute_forward(order, piece, partial(self._saving, forward))
        except MicroBatchNotFinite:
            if self._trailing is None:  # else it is of the update before
                await self.update.counted()  # which is reported first
            raise

    def _saving(
        self, run: Weighed, inputs: list[Tensor], targets: list[Tensor], weight: float | None
    ) -> list[Tensor]:
        self._save()
        return run(inputs, targets, weight=weight)

    def _save(self) -> None:
        """Before the round's first forward, in the same task: keep what forwards will write."""
        if not self._is_saved:
            self.live.save(self._micro_batches)
            self._is_saved = True

    async def _trailing_forward(
        self, order: RoundOrder, piece: MicroBatchSlice, forward: Callable[..., list[Tensor]]
    ) -> float:
        """The round's first, which makes the update of the round before."""
        reduction = self._io.reduction
        assert reduction is not None
        arrived = reduction.arrived
        update = OverlappedUpdate(self.live, reduction.summed, arrived, order.round.micro_batches)
        async with task_scope() as scope:
            summed = asyncio.Event()
            ending = scope.create_task(self._end_trailing(order, summed))
            try:
                given = await self._inputs(order, piece, started=False)
                inputs, targets, weight = self._weighed(order, piece, *given)
                scope.create_task(self._report_started(piece, summed))
                compute = partial(forward, passing=update, weight=weight)
                outputs = await self._run_forward_of(order, piece, compute, inputs, targets)
            except BaseException:
                arrived.give_up()  # the thread is idle soon
                raise
            self._is_saved = True
            self._busy += CpuSpan(-arrived.waited_seconds, 0.0)
            await ending
        return await self._give_forward(order, piece, outputs, weight)

    async def _report_started(self, piece: MicroBatchSlice, summed: asyncio.Event) -> None:
        """Not before the sums are there: what is fed then would take the wire from them."""
        await summed.wait()
        await self._links.send_started(piece, targets=False)
        if self.task.uses_targets:
            await self._links.send_started(piece, targets=True)

    async def _backward(
        self,
        order: RoundOrder,
        piece: MicroBatchSlice,
        compute: Callable[..., list[Tensor | None]],
    ) -> None:
        await self._compute_backward(order, piece, partial(compute, piece.key.micro_batch))

    async def _weights(
        self, order: RoundOrder, *keys: int, final: Callable[[str], None] | None = None
    ) -> None:
        run = partial(self.live.stage.backward_weights, *keys, final=final)
        key = MicroBatchKey(order.round.index, keys[0] if keys else NONE)
        await self._run((2, -self.task.index), run, "weight", key)
        await self._reach("backward.weights.after", order)

    def _final(self) -> Callable[[str], None] | None:
        """Receives the final gradients of the last backward of a round."""
        return None if self._io.reduction is None else self._io.reduction.final

    async def _complete(self, order: RoundOrder) -> bool:
        """Everything that the update needs, of other devices too; whether it leads."""
        self.waits_for_group, began = True, perf_counter()
        if self._io.reduction is not None:
            await self._io.reduction.finish()
            self._note_wait("wait sum", began)
        is_tied = await self._links.exchange_gradients(order)
        self.waits_for_group = False
        if self._may_lead(order) and await self.update.begin(order, leads=True):
            await self._check_lead(order)
            return True
        await self._check(order, is_tied=is_tied)
        await self._links.send_norms(order)
        if self._is_first:
            await self._run((0, self.task.index), self.live.optimizer.reserve)
            self._is_first = False
        return False

    def _may_lead(self, order: RoundOrder) -> bool:
        """Whether the update may be given to an accelerator before its gradients are looked at."""
        if self._device.is_host or self._is_first or self._io.reduction is not None:
            return False
        goes_ahead = self.update.goes_ahead and not order.may_change_nothing
        return goes_ahead and not order.clip and not order.counts_nothing

    async def _check_lead(self, order: RoundOrder) -> None:
        """As `_check`: the accelerator makes the update meanwhile."""
        assert self.live.norms is not None
        await self.live.norms.arrived()
        if not self.live.led_safely():
            broken = await self._run((0, self.task.index), self.live.broken_lead)
            if broken is not None:
                raise self._not_finite(order, broken)

    async def _check(self, order: RoundOrder, *, is_tied: bool = False) -> None:
        """Everything is there: is it finite, and will what the update gives be?

        Raises:
            MicroBatchNotFinite: it is not, and the update is not to be left out.
        """
        reduction, live = self._io.reduction, self.live
        summed = None
        if reduction is not None and not is_tied:
            summed = reduction.summed.norm
            is_trailing = self._trailing is not None
            if is_trailing and live.finite.is_safe(summed, order.numbers):
                return  # the compute thread may be in the next round's forward
        broken = await self._run((0, self.task.index), partial(live.broken, order, summed))
        if broken is None:
            return
        is_scaled = order.may_be_skipped and broken.what == "gradient"
        if order.leaves_out or is_scaled:
            self._is_finite = False
            return
        if self._trailing is None:
            await self.update.counted()  # an update before this one is reported before
        raise self._not_finite(order, broken)

    def _not_finite(self, order: RoundOrder, broken: Broken) -> MicroBatchNotFinite:
        stage, step = self.live.stage, order.round.step + 1
        return broken_update(
            *(broken, step, stage.description, stage.first, stage.end), scale=order.scale
        )


def _draw(piece: MicroBatchSlice) -> int:
    """What random numbers depend on: the micro-batch, and where in it a part begins.

    So parts of one micro-batch on several devices do not share their masks.
    """
    return piece.key.micro_batch + (piece.first << 32)
