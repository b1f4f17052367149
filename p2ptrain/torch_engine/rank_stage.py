"""One rank's whole model: computes its micro-batches, adds up with the others, and updates.

Every rank makes the same update of the same sums, so all keep the same weights to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.errors import CaptureError
from p2ptrain.holder.input.loader import LoadedMicroBatch
from p2ptrain.holder.snapshots.checkpointer import split_state
from p2ptrain.holder.start.prepared_job import PreparedJob
from p2ptrain.job.rounds import Round
from p2ptrain.messages.round_orders import RoundOrder
from p2ptrain.model.stage import cross_stage_gradients
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failing_unit
from p2ptrain.model.stage.optimizer import StageOptimizer, trained_parameters
from p2ptrain.model.stage.optimizer_form import PlainColumns
from p2ptrain.model.stage.running_statistics import NotShareable
from p2ptrain.model.stage.stage import Stage
from p2ptrain.plan.types.allocation import deal
from p2ptrain.recovery.commit import LEFT_OUT, SKIPPED, Coefficient
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.executor import OperatorFailed, refused
from p2ptrain.runtime.live_stage import LiveStage
from p2ptrain.runtime.not_finite import broken_update
from p2ptrain.torch_engine.ranks import Ranks


@dataclass(frozen=True, slots=True)
class MadeUpdate:
    """What became of one update.

    Attributes:
        norm: of the gradients, where the job clips.
        scale: of the loss, in float16.
        left_out: it changes nothing, because something of it is not finite.
        broken: why, where the job has to end with that; else "".
    """

    loss: float
    rates: tuple[float, ...]
    norm: float | None = None
    scale: float | None = None
    left_out: bool = False
    broken: str = ""


class RankStage:
    """See the module. Created on all ranks at once.

    Attributes:
        step: updates behind its weights, as rank 0 began with them.
        evaluated: the highest step whose evaluation is reported.
    """

    def __init__(self, ranks: Ranks, device: ComputeDevice, prepared: PreparedJob) -> None:
        self._ranks, self._device, self._prepared = ranks, device, prepared
        self._description, job = prepared.captured.description, prepared.job
        scale = prepared.loss_scale
        self._scale = scale
        state = ranks.from_first(prepared.state)
        mine = [prepared.first_step, prepared.evaluated, job.numbers.measured]
        mine.append(() if scale is None else scale.rows)
        self.step, self.evaluated, measured, scales = ranks.shared(mine)
        job.numbers.begin(tuple((step, value) for step, value in measured))
        if scale is not None:
            scale.begin(self.step, tuple((step, value) for step, value in scales))
        with ranks.together():
            self._live = self._made(state)
        self._order = [*self._live.optimizer.parameters]

    def _made(self, state: dict[str, Tensor]) -> LiveStage:
        model, slots = split_state(state)
        trained = [*trained_parameters(self._description)]
        spec, units = self._prepared.optimizer, len(self._description.units)
        shared, device = self._ranks.world > 1, self._device
        try:
            stage = Stage(self._description, 0, units, model, shared=shared, device=device)
        except NotShareable as error:
            raise CaptureError(f"{error}: train it with one process") from error
        own = stage.parameters()
        parameters = {name: own[name] for name in trained if name in own}
        optimizer = StageOptimizer(spec, parameters, spec.group_of(trained), device)
        if slots:
            optimizer.load_state(slots)
        return LiveStage(stage, optimizer, Version(self.step, 0), 0)

    def begin(self, shape: Round) -> None:
        """A round of training."""
        self._live.save(shape.micro_batches)

    def compute(self, piece: LoadedMicroBatch) -> float:
        """Its part of the loss, and of the gradients, where it is this rank's micro-batch."""
        shape, feed, number = piece.planned.round, piece.feed, piece.feed.piece.key.micro_batch
        if deal(shares(shape.micro_batches, self._ranks.world))[number] != self._ranks.rank:
            return 0.0
        weight = feed.piece.size / shape.samples if feed.weights is None else feed.weights.whole
        stage, (inputs, targets) = self._live.stage, self._inside(piece)
        seed = (self._prepared.job.seed, shape.step, number)
        scale = 0.0 if self._scale is None else self._scale.of(shape.step)
        try:
            outputs = stage.forward(number, inputs, targets, weight=weight, seed=seed, scale=scale)
        except OPERATORS_RAISE as error:
            raise _named(error, shape, number) from error
        loss = outputs[0].item() * weight if weight else 0.0
        stage.backward(number)
        return loss

    def evaluate(self, piece: LoadedMicroBatch) -> list[Tensor]:
        """The loss, and the tensors of the model's output, in host memory."""
        live, (inputs, targets) = self._live, self._inside(piece)
        averages = live.optimizer.averages() if self._prepared.job.eval_with_ema else None
        try:
            outputs = live.stage.evaluate(inputs, targets, instead=averages)
        except OPERATORS_RAISE as error:
            number = piece.feed.piece.key.micro_batch
            raise _named(error, piece.planned.round, number) from error
        return [tensor for tensor in self._device.fetched(outputs) if tensor is not None]

    def _inside(self, piece: LoadedMicroBatch) -> tuple[list[Tensor], list[Tensor]]:
        inputs, targets = piece.feed.inputs, piece.feed.targets
        copy = self._device.copy_in
        return [copy(tensor) for tensor in inputs], [copy(tensor) for tensor in targets]

    @property
    def has_gradients(self) -> list[float]:
        """Of each trained parameter 1.0 or 0.0: whether it has one here."""
        gradients = self._live.optimizer.gradients()
        return [float(gradients[name] is not None) for name in self._order]

    def update(
        self, piece: LoadedMicroBatch, numbers: PlainColumns, loss: float, users: list[float]
    ) -> MadeUpdate:
        """Add up with the others, and update.

        Args:
            piece: of the round.
            numbers: of the optimizer.
            loss: of all ranks.
            users: how many ranks have a gradient of each trained parameter.
        """
        shape, live, job = piece.planned.round, self._live, self._prepared.job
        weights = piece.feed.weights
        scale = 0.0 if self._scale is None else self._scale.of(shape.step)
        order = RoundOrder(
            *(shape, numbers),
            clip=job.clip_grad_norm or 0.0,
            leaves_out=job.skip_nonfinite,
            counts_nothing=weights is not None and weights.counts_nothing,
            scale=scale,
        )
        self._add_up(users)
        broken = live.broken(order, None)
        live.get_ready(order)
        coefficient, norm, said = None, None, ""  # type: Coefficient | None, float | None, str
        if broken is not None and broken.what == "gradient" and order.may_be_skipped:
            coefficient = LEFT_OUT if order.leaves_out else SKIPPED
        elif broken is not None or not math.isfinite(loss):
            coefficient = LEFT_OUT
            said = f"the loss became {loss} at step {shape.step + 1}"
            if broken is not None and math.isfinite(loss):
                of_model = self._description, 0, len(self._description.units)
                said = str(broken_update(broken, shape.step + 1, *of_model, scale=scale))
        elif job.clip_grad_norm is not None:
            coefficient, norm = self._clipped(job.clip_grad_norm)
        live.apply(coefficient)
        said = "" if order.leaves_out else said
        if not said:
            self.step = shape.step + 1
            if self._scale is not None:
                self._scale.decided(self.step, skipped=coefficient in (LEFT_OUT, SKIPPED))
        rates = job.numbers.rates(numbers)
        return MadeUpdate(loss, rates, norm, scale or None, coefficient == LEFT_OUT, said)

    def _add_up(self, users: list[float]) -> None:
        """Gradients, where any rank has one, and terms of running statistics."""
        if self._ranks.world == 1:
            return
        parameters, statistics = self._live.optimizer.parameters, self._live.stage.statistics
        used = (name for name, count in zip(self._order, users, strict=True) if count)
        summed = [_dense_gradient(parameters[name]) for name in used]
        if statistics is not None:
            summed += statistics.sums.values()
        self._ranks.add_up(summed)

    def _clipped(self, clip: float) -> tuple[Coefficient, float]:
        norms = [*cross_stage_gradients.tensor_norms(self._live.optimizer.gradients()).values()]
        coefficient = cross_stage_gradients.clip_coefficient(norms, clip)
        norm = float(cross_stage_gradients.total_norm(norms))
        return cross_stage_gradients.to_number(coefficient), norm

    def on_host(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's tensors, and the optimizer's."""
        return split_state(self._live.on_host(self._live.present()))

    def averages(self) -> dict[str, Tensor]:
        """Of the weights, where the job keeps them."""
        averages = self._live.optimizer.averages()
        tensors = self._device.fetched([*averages.values()])
        return {n: t for n, t in zip(averages, tensors, strict=True) if t is not None}


def shares(micro_batches: int, world: int) -> tuple[int, ...]:
    """How many micro-batches of a round each rank takes."""
    least, more = divmod(micro_batches, world)
    return tuple(least + (rank < more) for rank in range(world))


def _dense_gradient(parameter: Parameter) -> Tensor:
    """The gradient of a parameter of which some rank has one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout is not torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _named(error: Exception, shape: Round, number: int) -> Exception:
    """The same error in words that say where, if that is known."""
    unit = failing_unit(error)
    return error if unit is None else OperatorFailed(refused(error, unit, shape, number))
