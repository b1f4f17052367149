"""Carries out one stage's schedule, round after round.

Computing, packing and sending overlap: the compute thread runs one task of this stage at a time,
while two sender tasks hand finished activations and gradients to the links. What may lie between
them is bounded: in a training round by the schedule itself (a stage forwards at most `warmup`
pieces ahead of their backwards), in an evaluation by credits.

    inlets            schedule (1F1B)              outlets
    activations --+                          +--> activations to stage p+1
    targets ------+--> forward / backward ---+--> gradients  to stage p-1
    gradients ----+    then one update       +--> done, losses to the holder
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from p2ptrain.errors import TrainingError
from p2ptrain.model.optimizer import StageOptimizer
from p2ptrain.model.stage import Stage
from p2ptrain.plan.schedule import one_f_one_b
from p2ptrain.training.compute import ComputeThread
from p2ptrain.training.inlet import Inlet, Piece, Value
from p2ptrain.training.protocol import PieceKey, RoundOrder
from p2ptrain.training.rounds import Mode

T = TypeVar("T")
_Send: TypeAlias = Callable[[Piece, Sequence[Value]], Awaitable[None]]


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
        seed: of the job.
        uses_targets: whether the holder sends it targets.
    """

    index: int
    last: bool
    warmup: int
    seed: int
    uses_targets: bool


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a stage tells the holder after a round.

    Attributes:
        loss: weighted sum of the pieces' losses; 0.0 except at the last stage.
        compute_seconds: wall seconds its tasks took in the compute thread.
    """

    round: int
    loss: float
    compute_seconds: float


class StageLinks(Protocol):
    """Where a stage's results go."""

    async def send_forward(self, piece: Piece, values: Sequence[Value]) -> None:
        """Activations to the next stage."""

    async def send_backward(self, piece: Piece, values: Sequence[Value]) -> None:
        """Gradients to the stage before."""

    async def send_output(self, piece: Piece, values: Sequence[Value]) -> None:
        """The model's outputs of an evaluated piece, to the holder."""

    async def send_started(self, piece: Piece, targets: bool) -> None:
        """Credit: whoever feeds the activations (or targets) may send one more piece."""

    async def evaluation_credit(self, key: PieceKey) -> None:
        """Wait until the next stage may be sent this piece of an evaluation."""

    async def exchange_gradients(self, order: RoundOrder) -> None:
        """Sum the gradients of tied tensors over the stages that share them."""

    async def clip(self, order: RoundOrder) -> None:
        """Scale the gradients by the global norm's coefficient, where the job clips."""

    async def report(self, report: RoundReport) -> None:
        """Tell the holder that the round is done here."""


class StageRunner:
    """One stage on this device, for one epoch."""

    def __init__(
        self,
        task: StageTask,
        stage: Stage,
        optimizer: StageOptimizer,
        links: StageLinks,
        compute: ComputeThread,
        inlets: tuple[Inlet, Inlet, Inlet],
    ) -> None:
        self.task = task
        self.stage = stage
        self.optimizer = optimizer
        self.activations, self.targets, self.gradients = inlets
        self.snapshots: dict[int, dict[str, Tensor]] = {}
        self._links = links
        self._compute = compute
        self._orders: asyncio.Queue[RoundOrder] = asyncio.Queue(maxsize=4)
        self._forwards: asyncio.Queue[tuple[Piece, list[Value]]] = asyncio.Queue(task.warmup)
        self._backwards: asyncio.Queue[tuple[Piece, list[Value]]] = asyncio.Queue(task.warmup)
        self._compute_seconds = 0.0

    async def order(self, order: RoundOrder) -> None:
        """Queue a round; the holder keeps at most two ahead."""
        await self._orders.put(order)

    async def run(self) -> None:
        """Serve rounds until cancelled. Raises what a task of this stage raised."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send(self._forwards, self._send_forward))
            group.create_task(self._send(self._backwards, self._links.send_backward))
            group.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            order = await self._orders.get()
            self._compute_seconds = 0.0
            if order.round.mode is Mode.TRAIN:
                loss = await self._train(order)
            else:
                loss = await self._evaluate(order)
            await self._links.report(RoundReport(order.round.index, loss, self._compute_seconds))

    async def _train(self, order: RoundOrder) -> float:
        shape = order.round
        loss = 0.0
        for action in one_f_one_b(shape.micro_batches, self.task.warmup):
            piece = self._piece(order, action.micro_batch)
            if action.kind == "forward":
                loss += await self._forward(order, piece) * shape.weight(action.micro_batch)
            else:
                await self._backward(piece)
        await self._update(order)
        return loss

    async def _forward(self, order: RoundOrder, piece: Piece) -> float:
        """Returns the piece's unweighted loss at the last stage, 0.0 elsewhere."""
        number = piece.key.micro_batch
        inputs, targets = await self._inputs(piece)
        run = partial(
            self.stage.forward,
            number,
            inputs,
            targets,
            weight=order.round.weight(number) if self.task.last else None,
            seed=(self.task.seed, order.round.step, number),
        )
        outputs = await self._run((1, -self.task.index), run)
        if not self.task.last:
            await self._forwards.put((piece, list(outputs)))
            return 0.0
        return self._checked_loss(outputs[0].item(), order, piece.key)

    async def _backward(self, piece: Piece) -> None:
        number = piece.key.micro_batch
        gradients = [] if self.task.last else await self.gradients.take(piece.key)
        run = partial(self.stage.backward, number, gradients)
        result = await self._run((0, self.task.index), run)
        if self.task.index > 0:
            await self._backwards.put((piece, list(result)))

    async def _update(self, order: RoundOrder) -> None:
        await self._links.exchange_gradients(order)
        await self._links.clip(order)
        await self._run((0, self.task.index), partial(self._apply, order))

    def _apply(self, order: RoundOrder) -> None:
        self.optimizer.step(order.lr_factor)
        self.optimizer.zero_grad()
        if order.snapshot:
            self.snapshots = {order.round.step + 1: self.full_state(copy=True)}

    def full_state(self, *, copy: bool) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state by name; see `state_transfer`."""
        tensors = {f"model:{name}": tensor for name, tensor in self.stage.state().items()}
        tensors |= {f"optimizer:{name}": t for name, t in self.optimizer.state().items()}
        return {name: t.detach().clone() if copy else t.detach() for name, t in tensors.items()}

    async def _evaluate(self, order: RoundOrder) -> float:
        shape = order.round
        loss = 0.0
        for number in range(shape.micro_batches):
            piece = self._piece(order, number)
            inputs, targets = await self._inputs(piece)
            run = partial(self.stage.evaluate, inputs, targets)
            outputs: list[Value] = list(await self._run((1, -self.task.index), run))
            if not self.task.last:
                await self._forwards.put((piece, outputs))
                continue
            loss += _tensors(outputs)[0].item() * shape.weight(number)
            if order.outputs:
                await self._links.send_output(piece, outputs[1:])
        return loss

    async def _inputs(self, piece: Piece) -> tuple[list[Tensor], list[Tensor]]:
        inputs = _tensors(await self.activations.take(piece.key))
        await self._links.send_started(piece, targets=False)
        if not self.task.uses_targets:
            return inputs, []
        targets = _tensors(await self.targets.take(piece.key))
        await self._links.send_started(piece, targets=True)
        return inputs, targets

    async def _send_forward(self, piece: Piece, values: Sequence[Value]) -> None:
        if piece.mode is Mode.EVAL:
            await self._links.evaluation_credit(piece.key)
        await self._links.send_forward(piece, values)

    @staticmethod
    async def _send(
        queue: asyncio.Queue[tuple[Piece, list[Value]]],
        send: _Send,
    ) -> None:
        while True:
            piece, values = await queue.get()
            await send(piece, values)

    async def _run(self, urgency: tuple[int, ...], function: Callable[[], T]) -> T:
        started = monotonic()
        try:
            return await self._compute.run(urgency, function)
        finally:
            self._compute_seconds += monotonic() - started

    @staticmethod
    def _checked_loss(loss: float, order: RoundOrder, key: PieceKey) -> float:
        if not math.isfinite(loss):
            raise NotFinite(loss, order.round.step + 1, key)
        return loss

    @staticmethod
    def _piece(order: RoundOrder, number: int) -> Piece:
        key = PieceKey(order.round.index, number)
        return Piece(key, order.round.mode, order.round.size(number))


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    """Activations are never None; the inlets have made sure of it."""
    return [value for value in values if value is not None]
