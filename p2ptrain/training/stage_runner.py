"""Carries out one stage's schedule on this device, round after round.

Computing, packing and sending overlap: the compute thread runs one task of this stage at a time,
while the outlets hand finished activations and gradients to the links.

    inlets            schedule (1F1B)              outlets
    activations --+                          +--> activations to stage p+1
    targets ------+--> forward / backward ---+--> gradients  to stage p-1
    gradients ----+         |                +--> done, losses to the holder
                       all-reduce in the group, begun during the last backward
    commit ------------> one update

An update waits until the holder says that all devices have their gradients: so nobody is ever more
than one update ahead of another (`recovery.committing`). The stages that end a round first hear of
it while the last one, the first of the pipeline, already makes its own update.

Where the plan splits the backward, gradients of weights are computed while an input is awaited, and
the rest before the stage is done (`plan.schedule.ZeroBubble`).

A device that shares the stage with others does those tasks of the stage's order in which it has a
part.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.errors import TrainingError
from p2ptrain.model.share import Span
from p2ptrain.plan.schedule import Action, ZeroBubble, one_f_one_b
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.division import Division
from p2ptrain.training.inlet import Gathered, Piece, Value
from p2ptrain.training.live_stage import LiveStage
from p2ptrain.training.protocol import Commit, PieceKey, RoundOrder
from p2ptrain.training.rounds import Mode, Round
from p2ptrain.training.stage_ends import Lines, RoundReport, StageLinks
from p2ptrain.training.update import Update
from p2ptrain.training.versions import VersionStore

T = TypeVar("T")
_Backward: TypeAlias = Callable[[int, Sequence[Value]], list[Tensor | None]]


class NotFinite(TrainingError):
    """The loss of a piece is NaN or infinite.

    Attributes:
        step: number of the update it would have gone into, from 1.
        key: the piece; its stages still hold what it needs for a diagnosis.
    """

    def __init__(self, loss: float, step: int, key: PieceKey) -> None:
        super().__init__(f"the loss became {loss} at step {step}")
        self.loss = loss
        self.step = step
        self.key = key


@dataclass(frozen=True, slots=True)
class StageTask:
    """What a stage is, besides its units.

    Attributes:
        index: number of the stage, from 0.
        last: whether it is the one that computes the loss.
        warmup: K_p.
        held: most micro-batches without their weight gradients; None = the backward is not split.
        seed: of the job.
        uses_targets: whether the holder sends it targets.
        division: how its devices divide the work.
        device: this one.
        keeps: whether this device copies the stage when a round's order says so.
    """

    index: int
    last: bool
    warmup: int
    held: int | None
    seed: int
    uses_targets: bool
    division: Division
    device: str
    keeps: bool

    def piece(self, shape: Round, number: int) -> Piece | None:
        """This device's part of a micro-batch; None = it has none."""
        size = shape.size(number)
        part = self.division.part(self.device, number, size)
        if part is None:
            return None
        return Piece(PieceKey(shape.index, number), shape.mode, size, part.first, part.end)

    def pieces(self, shape: Round) -> Iterator[Piece]:
        """This device's parts of a round, ascending."""
        for number in range(shape.micro_batches):
            piece = self.piece(shape, number)
            if piece is not None:
                yield piece


class StageRunner:
    """One stage on this device, for one epoch.

    Attributes:
        live: its tensors.
        update: the second half of its rounds.
    """

    def __init__(
        self,
        task: StageTask,
        live: LiveStage,
        links: StageLinks,
        lines: Lines,
        compute: ComputeThread,
        store: VersionStore,
    ) -> None:
        self.task = task
        self.live = live
        self._links = links
        self._lines = lines
        self._compute = compute
        self._orders: asyncio.Queue[RoundOrder] = asyncio.Queue(maxsize=4)
        self._busy = Span(0.0, 0.0)
        run = partial(self._run, (0, task.index))
        self.update = Update(
            live, run, store, device=task.device, stage=task.index, keeps=task.keeps
        )
        self._is_first = True
        self._is_saved = False  # what the forwards of this round write

    async def order(self, order: RoundOrder) -> None:
        """Queue a round; the holder keeps at most two ahead."""
        await self._orders.put(order)

    def commit(self, commit: Commit) -> None:
        """The update that this stage is ready for counts; see `Update.commit`."""
        self.update.commit(commit)

    async def run(self) -> None:
        """Serve rounds until cancelled. Raises what a task of this stage raised."""
        async with asyncio.TaskGroup() as group:
            for part in (self._lines.forward, self._lines.backward, self._lines.reduction):
                if part is not None:
                    group.create_task(part.run())
            group.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            order = await self._orders.get()
            if order.round.mode is Mode.TRAIN:
                await self._train(order)
            else:
                await self._report(order, await self._evaluate(order))

    async def _report(self, order: RoundOrder, loss: float) -> None:
        busy, self._busy = self._busy, Span(0.0, 0.0)
        if failpoints.armed:
            await self._reach("done.send.before", order)
        await self._links.report(RoundReport(order.round.index, loss, busy))
        if failpoints.armed:
            await self._reach("done.send.after", order)

    # -- training --------------------------------------------------------------------------------

    async def _train(self, order: RoundOrder) -> None:
        if self._lines.reduction is not None:
            self._lines.reduction.begin(order)
        self._is_saved = False
        if self.task.held is None:
            loss = await self._in_strict_order(order)
        else:
            loss = await self._in_two_parts(order, self.task.held)
        await self._complete(order)
        await self.update.make(order, partial(self._report, order, loss))

    async def _in_strict_order(self, order: RoundOrder) -> float:
        loss = 0.0
        actions = list(self._own_actions(order.round))
        for number, (action, piece) in enumerate(actions):
            if action.kind == "forward":
                loss += await self._forward(order, piece)
            else:
                final = self._final() if number == len(actions) - 1 else None
                backward = partial(self.live.stage.backward, final=final)
                await self._backward(order, piece, backward)
        return loss

    async def _in_two_parts(self, order: RoundOrder, held: int) -> float:
        loss = 0.0
        pieces = {piece.key.micro_batch: piece for piece in self.task.pieces(order.round)}
        schedule = ZeroBubble([action for action, _ in self._own_actions(order.round)], held)

        def is_ready(action: Action) -> bool:
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

    def _has_inputs(self, action: Action, key: PieceKey) -> bool:
        lines = self._lines
        if action.kind == "backward":
            return lines.gradients is None or lines.gradients.has(key)
        return lines.activations.has(key) and (not self.task.uses_targets or lines.targets.has(key))

    def _own_actions(self, shape: Round) -> Iterator[tuple[Action, Piece]]:
        """The stage's order without the micro-batches in which this device has no part."""
        for action in one_f_one_b(shape.micro_batches, self.task.warmup):
            piece = self.task.piece(shape, action.micro_batch)
            if piece is not None:
                yield action, piece

    async def _forward(self, order: RoundOrder, piece: Piece) -> float:
        """Returns this part of the round's loss at the last stage, 0.0 elsewhere."""
        number, weight = piece.key.micro_batch, piece.samples / order.round.samples
        inputs, targets = await self._inputs(order, piece)
        forward = partial(
            self.live.stage.forward,
            number,
            weight=weight if self.task.last else None,
            seed=(self.task.seed, order.round.step, _draw(piece)),
            share=piece.samples / piece.size,
            split=self.task.held is not None,
        )
        run = partial(_on_joined, forward, inputs, targets)
        if not self._is_saved:
            run = partial(self._saving, run)
        outputs = await self._run((1, -self.task.index), run)
        if failpoints.armed:
            await self._reach("forward.compute.after", order)
        if self._lines.forward is not None:
            await self._lines.forward.put(piece, outputs)
            return 0.0
        return self._checked_loss(outputs[0].item(), order, piece.key) * weight

    def _saving(self, run: Callable[[], T]) -> T:
        """Before the round's first forward, in the same task: keep what forwards will write."""
        self.live.save()
        self._is_saved = True
        return run()

    async def _backward(self, order: RoundOrder, piece: Piece, compute: _Backward) -> None:
        inlet = self._lines.gradients
        if failpoints.armed:
            await self._reach("backward.receive.before", order)
        given = None if inlet is None else await inlet.take(piece.key)
        if failpoints.armed:
            await self._reach("backward.receive.after", order)
        run = partial(_on_joined_gradients, compute, piece.key.micro_batch, given)
        result = await self._run((0, self.task.index), run)
        if failpoints.armed:
            await self._reach("backward.compute.after", order)
        if self._lines.backward is not None:
            await self._lines.backward.put(piece, result)

    async def _weights(
        self, order: RoundOrder, *keys: int, final: Callable[[str], None] | None = None
    ) -> None:
        run = partial(self.live.stage.backward_weights, *keys, final=final)
        await self._run((2, -self.task.index), run)
        if failpoints.armed:
            await self._reach("backward.weights.after", order)

    def _final(self) -> Callable[[str], None] | None:
        """What the last backward of a round tells which gradients are final."""
        return None if self._lines.reduction is None else self._lines.reduction.final

    async def _complete(self, order: RoundOrder) -> None:
        """Everything that the update needs, of other devices too."""
        if self._lines.reduction is not None:
            await self._lines.reduction.finish()
        await self._links.exchange_gradients(order)
        await self._links.send_norms(order)
        if self._is_first:
            await self._run((0, self.task.index), self.live.optimizer.reserve)
            self._is_first = False

    # -- evaluating ------------------------------------------------------------------------------

    async def _evaluate(self, order: RoundOrder) -> float:
        loss = 0.0
        for piece in self.task.pieces(order.round):
            inputs, targets = await self._inputs(order, piece)
            run = partial(_on_joined, self.live.stage.evaluate, inputs, targets)
            outputs = await self._run((1, -self.task.index), run)
            if self._lines.forward is not None:
                await self._lines.forward.put(piece, outputs)
                continue
            loss += outputs[0].item() * piece.samples / order.round.samples
            if order.outputs:
                await self._links.send_output(piece, outputs[1:])
        return loss

    # -- both ------------------------------------------------------------------------------------

    async def _inputs(self, order: RoundOrder, piece: Piece) -> tuple[Gathered, Gathered | None]:
        if failpoints.armed:
            await self._reach("forward.receive.before", order)
        inputs = await self._lines.activations.take(piece.key)
        if failpoints.armed:
            await self._reach("forward.receive.after", order)
        await self._links.send_started(piece, targets=False)
        if not self.task.uses_targets:
            return inputs, None
        targets = await self._lines.targets.take(piece.key)
        await self._links.send_started(piece, targets=True)
        return inputs, targets

    async def _run(self, urgency: tuple[int, ...], function: Callable[[], T]) -> T:
        result, spent = await self._compute.run_timed(urgency, function)
        self._busy += spent
        return result

    async def _reach(self, name: str, order: RoundOrder) -> None:
        task, step = self.task, order.round.step
        await failpoints.reach(name, device=task.device, stage=task.index, step=step)

    @staticmethod
    def _checked_loss(loss: float, order: RoundOrder, key: PieceKey) -> float:
        if not math.isfinite(loss):
            raise NotFinite(loss, order.round.step + 1, key)
        return loss


def _on_joined(
    function: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
    inputs: Gathered,
    targets: Gathered | None,
) -> list[Tensor]:
    """Put the parts of a piece together in the compute thread, and go on with them."""
    joined = _tensors(targets.join()) if targets is not None else []
    return function(_tensors(inputs.join()), joined)


def _on_joined_gradients(
    compute: _Backward, number: int, given: Gathered | None
) -> list[Tensor | None]:
    return compute(number, given.join() if given is not None else [])


def _draw(piece: Piece) -> int:
    """What random numbers depend on: the micro-batch, and where in it a part begins.

    So parts of one micro-batch on several devices do not share their masks.
    """
    return piece.key.micro_batch + (piece.first << 32)


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    """Activations are never None; the inlets have made sure of it."""
    return [value for value in values if value is not None]
