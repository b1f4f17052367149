"""What all stage executors share: stage I/O, tasks and evaluation.

Computing, packing and sending overlap: the compute thread runs one task of this stage at a time,
while the output queues hand finished activations and gradients to the links.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TypeAlias, TypeVar

from torch import Tensor

from p2ptrain import failpoints
from p2ptrain.devices.interface import ComputeDevice, DeviceWatch, HostCopies
from p2ptrain.errors import TrainingError
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.messages.round_orders import RoundOrder, RoundReport
from p2ptrain.messages.tensors import MicroBatchKey, MicroBatchSlice, Value
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failing_unit, of_samples
from p2ptrain.plan.types.timeline import EntryKind
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.cpu_share import CpuSpan
from p2ptrain.runtime.io.replay_log import ReplayLog
from p2ptrain.runtime.io.sample_division import SampleDivision
from p2ptrain.runtime.io.tensor_receiver import GatheredValues
from p2ptrain.runtime.io.tensor_router import ACTIVATIONS, GRADIENTS
from p2ptrain.runtime.live_stage import TrainedStage
from p2ptrain.runtime.not_finite import MicroBatchNotFinite
from p2ptrain.runtime.spans import NONE
from p2ptrain.runtime.stage_io import StageIo, StageSender, TiedGradient

T = TypeVar("T")

Forward: TypeAlias = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""(inputs, targets) -> what crosses out, at the last stage the loss."""

Weighed: TypeAlias = Callable[..., list[Tensor]]
"""`Forward` with `weight`: the slice's part of the mini-batch at the last stage, else None."""

Backward: TypeAlias = Callable[..., list[Tensor | None]]
"""Gradients of what crossed out, none at the last stage, and `tied` -> those of what came in, and
of tied parameters that earlier stages use."""


class OperatorFailed(TrainingError):
    """An operator of the model cannot compute with what a piece holds."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What a stage is, besides its units.

    Attributes:
        index: number of the stage, from 0.
        last: whether it is the one that computes the loss.
        warmup: K_p.
        held: most micro-batches without their weight gradients; None = the backward is not split.
        seed: of the job.
        uses_targets: whether the holder sends it targets, or weights of slices beside them.
        weighed: whether behind a slice's targets comes its weight.
        division: how its devices divide the work.
        device: this one.
        keeps: whether this device copies the stage when a round's order says so.
        goes_ahead: whether it makes updates before they count (`update.OptimizerStep`).
        trails: whether a round may begin before the sums of the one before are there.
    """

    index: int
    last: bool
    warmup: int
    held: int | None
    seed: int
    uses_targets: bool
    division: SampleDivision
    device: str
    keeps: bool
    goes_ahead: bool = False
    trails: bool = False
    weighed: bool = False

    def piece(self, shape: Round, number: int) -> MicroBatchSlice | None:
        """This device's part of a micro-batch; None = it has none."""
        size = shape.size(number)
        part = self.division.part(self.device, number, size)
        if part is None:
            return None
        return MicroBatchSlice(
            *(MicroBatchKey(shape.index, number), shape.mode, size, part.first, part.end),
            lengths=shape.lengths,
        )

    def pieces(self, shape: Round) -> Iterator[MicroBatchSlice]:
        """This device's parts of a round, ascending."""
        for number in shape.numbers:
            piece = self.piece(shape, number)
            if piece is not None:
                yield piece


@dataclass(frozen=True, slots=True)
class _StageTask:
    """What a task in the compute thread is, for its span."""

    kind: EntryKind
    key: MicroBatchKey


class StageExecutor(ABC):
    """One stage on this device, for one generation.

    Attributes:
        live: its tensors.
        round: index of the one that was begun last.
        waits_for_group: for other devices that have the same stage.
    """

    def __init__(
        self,
        task: StageSpec,
        live: TrainedStage,
        links: StageSender,
        io: StageIo,
        compute: ComputeThread,
        log: ReplayLog | None = None,
    ) -> None:
        """`log`: of what it sends; None = it is never replayed."""
        self.task = task
        self._tensors = live
        self._links = links
        self._io = io
        self._compute = compute
        self._log = log
        self._device = live.stage.device
        self._busy = CpuSpan(0.0, 0.0)
        # What an accelerator still computes, and since when.
        self._watches: list[tuple[DeviceWatch, _StageTask, float]] = []
        # An accelerator begins the backward while its loss is on the way.
        self._reads_losses_late = False
        self._late_losses: list[tuple[MicroBatchSlice, HostCopies, float]] = []
        self._is_finite = True  # all of this round
        self.round = 0  # that was begun last
        self.waits_for_group = False

    async def run(self) -> None:
        """Serve rounds until cancelled. Raises what a task of this stage raised."""
        async with asyncio.TaskGroup() as group:
            tied = (one.earlier for one in self._io.tied)
            for part in (self._io.forward, self._io.backward, self._io.reduction, *tied):
                if part is not None:
                    group.create_task(part.run())
            group.create_task(self._serve())

    @abstractmethod
    async def _serve(self) -> None:
        """Carry out what is ordered, until cancelled."""

    async def _report(self, order: RoundOrder, loss: float) -> None:
        self._read_watches()
        busy, self._busy = self._busy, CpuSpan(0.0, 0.0)
        is_finite, self._is_finite = self._is_finite, True
        await self._reach("done.send.before", order)
        report = RoundReport(order.round.index, loss, is_finite, busy.wall, busy.cpu, 0)
        await self._links.report(report)
        await self._reach("done.send.after", order)

    # -- pieces ----------------------------------------------------------------------------------

    async def _compute_forward(
        self, order: RoundOrder, piece: MicroBatchSlice, compute: Weighed
    ) -> float:
        """Returns this part of the round's loss at the last stage, 0.0 elsewhere."""
        inputs, targets, weight = self._weighed(order, piece, *await self._inputs(order, piece))
        run = partial(compute, weight=weight)
        outputs = await self._run_forward_of(order, piece, run, inputs, targets)
        return await self._give_forward(order, piece, outputs, weight)

    def _weighed(
        self,
        order: RoundOrder,
        piece: MicroBatchSlice,
        inputs: GatheredValues,
        targets: GatheredValues | None,
    ) -> tuple[GatheredValues, GatheredValues | None, float | None]:
        """Take the weight of a slice from behind its targets; None but at the last stage."""
        if not self.task.last:
            return inputs, targets, None
        if not self.task.weighed or targets is None:
            return inputs, targets, piece.samples / order.round.samples
        ((*leaves, weight),) = targets.slices  # whole from the holder
        assert isinstance(weight, Tensor)
        rest = replace(targets, slices=[leaves], dimensions=targets.dimensions[:-1])
        return inputs, rest, weight.item()

    async def _run_forward_of(
        self,
        order: RoundOrder,
        piece: MicroBatchSlice,
        compute: Forward,
        inputs: GatheredValues,
        targets: GatheredValues | None,
    ) -> HostCopies:
        """Raises OperatorFailed: the model does not work with these samples."""
        try:
            run = partial(on_joined, self._device, compute, inputs, targets)
            return await self._run((1, -self.task.index), run, "forward", piece.key)
        except OPERATORS_RAISE as error:
            unit = failing_unit(error)
            if unit is None:
                raise
            number = piece.key.micro_batch - order.round.first
            raise OperatorFailed(refused(error, unit, order.round, number)) from error

    async def _give_forward(
        self,
        order: RoundOrder,
        piece: MicroBatchSlice,
        outputs: HostCopies,
        weight: float | None = None,
    ) -> float:
        """Send on what a forward has made; as `_compute_forward`."""
        await self._reach("forward.compute.after", order)
        if self._io.forward is not None:
            self._note_sent(order, self.task.index + 1, ACTIVATIONS, piece, outputs.tensors)
            await self._io.forward.put(piece, outputs)
            return 0.0
        if not weight:  # of nothing there is no mean
            return 0.0
        if self._reads_losses_late:
            self._late_losses.append((piece, outputs, weight))
            return 0.0
        return await self._read_loss(order, piece, outputs) * weight

    async def _read_late_losses(self, order: RoundOrder) -> float:
        """This device's part of the round's loss, as far as it has not been read yet."""
        late, self._late_losses = self._late_losses, []
        loss = 0.0
        for piece, outputs, weight in late:
            loss += await self._read_loss(order, piece, outputs) * weight
        return loss

    async def _read_loss(
        self, order: RoundOrder, piece: MicroBatchSlice, outputs: HostCopies
    ) -> float:
        loss = await _number(outputs)
        if not math.isfinite(loss):
            number, shape = piece.key.micro_batch, order.round
            if order.leaves_out:
                self._is_finite = False
            elif not order.may_be_skipped:  # its gradients decide
                raise MicroBatchNotFinite(
                    f"the loss became {loss} at step {shape.step + 1}",
                    shape.step + 1,
                    micro_batch=number - shape.first,
                    micro_batch_number=number,
                )
        return loss

    async def _compute_backward(
        self, order: RoundOrder, piece: MicroBatchSlice, compute: Backward
    ) -> None:
        given = await self._gradients(order, piece)
        tied = [await _tied_of(one, piece) for one in self._io.tied]
        run = partial(_on_joined_gradients, self._device, compute, given, tied)
        result = await self._run((0, self.task.index), run, "backward", piece.key)
        await self._give_backward(order, piece, result)

    async def _gradients(self, order: RoundOrder, piece: MicroBatchSlice) -> GatheredValues | None:
        """Wait for those of what a piece gave; None at the last stage."""
        receiver = self._io.gradients
        await self._reach("backward.receive.before", order)
        given = None if receiver is None else await receiver.take(piece.key, piece.size)
        await self._reach("backward.receive.after", order)
        return given

    async def _give_backward(
        self, order: RoundOrder, piece: MicroBatchSlice, result: HostCopies
    ) -> None:
        """Send on what a backward has made."""
        await self._reach("backward.compute.after", order)
        tied = [one.earlier for one in self._io.tied if one.earlier is not None]
        count = len(result.tensors) - len(tied)
        if self._io.backward is not None:
            values = result.tensors[:count]
            self._note_sent(order, self.task.index - 1, GRADIENTS, piece, values)
            await self._io.backward.put(piece, result, values)
        for queue, value in zip(tied, result.tensors[count:], strict=True):
            await queue.put(piece, result, [value])

    def _note_sent(
        self,
        order: RoundOrder,
        stage: int,
        flow: str,
        piece: MicroBatchSlice,
        values: Sequence[Value],
    ) -> None:
        if self._log is not None:
            self._log.sent(order, stage, flow, piece, values)

    async def _evaluate(self, order: RoundOrder) -> float:
        loss = 0.0
        for piece in self.task.pieces(order.round):
            inputs, targets = await self._inputs(order, piece)
            evaluate = self._evaluate_averaged if order.averaged else self._tensors.stage.evaluate
            outputs = await self._run_forward_of(order, piece, evaluate, inputs, targets)
            if self._io.forward is not None:
                await self._io.forward.put(piece, outputs)
                continue
            loss += await _number(outputs) * piece.samples / order.round.samples
            if order.outputs:
                await self._links.send_output(piece, outputs.tensors[1:])
        return loss

    def _evaluate_averaged(self, inputs: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
        averages = self._tensors.optimizer.averages()
        return self._tensors.stage.evaluate(inputs, targets, instead=averages)

    async def _inputs(
        self, order: RoundOrder, piece: MicroBatchSlice, *, started: bool = True
    ) -> tuple[GatheredValues, GatheredValues | None]:
        """Wait for them; `started`: the feeder may send one more slice."""
        await self._reach("forward.receive.before", order)
        inputs = await self._io.activations.take(piece.key, piece.size)
        await self._reach("forward.receive.after", order)
        if started:
            await self._links.send_started(piece, targets=False)
        if not self.task.uses_targets:
            return inputs, None
        targets = await self._io.targets.take(piece.key, piece.size)
        if started:
            await self._links.send_started(piece, targets=True)
        return inputs, targets

    async def _run(
        self,
        urgency: tuple[int, ...],
        function: Callable[[], T],
        kind: EntryKind = "other",
        key: MicroBatchKey | None = None,
    ) -> T:
        """`kind` and `key`: of its span; without a key it is of the whole round."""
        task = _StageTask(kind, key or MicroBatchKey(self.round, NONE))
        updated_here = kind == "update" and self._tensors.stage.home.is_host
        if self._device.is_host or updated_here:
            result, spent, began = await self._compute.run_timed(urgency, function)
            self._busy += spent
            self._note_task(task, began, spent.wall)
            return result
        began = perf_counter()
        result, watch = await self._compute.run(urgency, partial(self._device.timed, function))
        self._watches.append((watch, task, began))
        return result

    def _note_task(self, task: _StageTask, began: float, seconds: float) -> None:
        key = task.key
        if self._io.spans.is_on:
            self._io.spans.add(
                *(task.kind, began, began + seconds),
                stage=self.task.index,
                round=key.round,
                micro_batch=key.micro_batch,
            )

    def _read_watches(self) -> None:
        """An accelerator does its tasks one after the other, none before it was given.

        An update that leads may be under way: it is read with the next round.
        """
        under_way = self._watches[-1:]
        if under_way and under_way[0][1].kind == "update":
            del self._watches[-1]
        else:
            under_way = []
        end = 0.0
        for watch, task, given in self._watches:
            seconds = watch.seconds()
            self._busy += CpuSpan(seconds, seconds)
            began = max(given, end)
            self._note_task(task, began, seconds)
            end = began + seconds
        self._watches = under_way

    def _note_wait(self, kind: EntryKind, began: float) -> None:
        if self._io.spans.is_on:
            self._io.spans.add_wait(kind, began, stage=self.task.index, round=self.round)

    async def _run_update(self, function: Callable[[], T]) -> T:
        return await self._run((0, self.task.index), function, "update")

    async def _reach(self, name: str, order: RoundOrder) -> None:
        task, step = self.task, order.round.step
        await failpoints.reach(name, device=task.device, stage=task.index, step=step)


def refused(error: Exception, unit: str, shape: Round, number: int) -> str:
    """The message about an operator that failed with micro-batch `number`, from 0, of a round."""
    where = "the evaluation" if shape.mode is RoundMode.EVAL else f"step {shape.step + 1}"
    advice = (
        "Look at its samples: labels or indices out of range, or values that the model does not "
        "take"
    )
    why = of_samples(error, advice)
    return f"layer {unit} failed with micro-batch {number} of {where}: {why}"


async def _number(outputs: HostCopies) -> float:
    """The first of them, which has one element."""
    await outputs.arrived()
    value = outputs.tensors[0]
    assert value is not None
    return value.item()


def on_joined(
    device: ComputeDevice,
    function: Forward,
    inputs: GatheredValues,
    targets: GatheredValues | None,
) -> HostCopies:
    """Put the parts of a piece together in the compute thread, and go on with them."""
    joined = device.copied_in(targets.join()) if targets is not None else []
    outputs = function(_tensors(device.copied_in(inputs.join())), _tensors(joined))
    return device.copy_out(outputs)


def _on_joined_gradients(
    device: ComputeDevice, compute: Backward, given: GatheredValues | None, tied: Sequence[Value]
) -> HostCopies:
    gradients = device.copied_in(given.join()) if given is not None else []
    return device.copy_out(compute(gradients, tied=device.copied_in(tied)))


async def _tied_of(one: TiedGradient, piece: MicroBatchSlice) -> Value:
    """What later stages have made of a tied parameter's gradient."""
    if one.later is None:
        return None
    (value,) = (await one.later.take(piece.key, piece.size)).join()
    return value


def _tensors(values: Sequence[Value]) -> list[Tensor]:
    """Activations are never None; the tensor receivers have made sure of it."""
    return [value for value in values if value is not None]
