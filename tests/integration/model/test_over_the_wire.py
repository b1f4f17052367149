"""Stages that meet only through packed tensors, updated and clipped apart, train like plain torch.

Bit for bit: order of samples, collation, strides and alignment on the wire, weights of ragged
micro-batches, clipping by the common norm, learning-rate schedule, optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from p2ptrain.holder.input.checked_dataset import CheckedDataset
from p2ptrain.holder.input.mini_batches import SampleOrder
from p2ptrain.job.job import Job
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.cross_stage_gradients import clip_coefficient, scale_, tensor_norms
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_spec import SGD, AdamW
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_codec import Unpacking, pack
from tests.support import reference, zoo

torch.set_num_threads(1)

STEPS, BATCH, MICRO_BATCH, MAX_NORM = 3, 8, 3, 0.5


def schedule(update: int) -> float:
    return 0.8**update


def sent(value: Tensor) -> Tensor:
    packed = pack(value)
    unpacking = Unpacking(packed.meta, (value.dtype, tuple(value.shape)))
    unpacking.buffer[:] = packed.part
    return unpacking.tensor()


@lru_cache
def captured(name: str) -> Captured:
    made = zoo.make(name, samples=4)
    return capture(made.model, made.loss, reference.stack(made.data), evaluation=False)


class Pipeline:
    """One stage a unit, all in this process."""

    def __init__(self, job: Job, captured: Captured) -> None:
        self.job, self.captured = job, captured
        description, state = self.captured.description, self.captured.state()
        cuts = range(len(description.units) + 1)
        self.stages = [Stage(description, first, end, state) for first, end in pairwise(cuts)]
        self.optimizers = [StageOptimizer(job.optimizer, s.parameters()) for s in self.stages]

    def train(self, steps: int) -> list[float]:
        samples = CheckedDataset(self.job.data)
        order = SampleOrder(len(samples), self.job.batch_size, self.job.seed)
        losses = []
        for step in range(steps):
            total = 0.0
            batch = order.batch(step)
            for number, first in enumerate(range(0, BATCH, MICRO_BATCH)):
                total += self._piece(number, batch[first : first + MICRO_BATCH], samples)
            losses.append(total)
            self._update(step)
        return losses

    def _piece(self, number: int, indices: Sequence[int], samples: CheckedDataset) -> float:
        inputs, target = samples.collate(indices, "seed")
        part = len(indices) / BATCH
        values: Sequence[Tensor] = self.captured.entering(inputs, "train")
        targets = self.captured.targets((inputs, target))
        for stage in self.stages:
            weight = part if stage is self.stages[-1] else None
            outputs = stage.forward(number, values, targets, weight=weight)
            values = [sent(output) for output in outputs]
        gradients: list[Tensor | None] = []
        for stage in reversed(self.stages):
            returned = stage.backward(number, gradients)
            gradients = [None if gradient is None else sent(gradient) for gradient in returned]
        return values[0].item() * part

    def _update(self, step: int) -> None:
        norms: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            norms |= tensor_norms(optimizer.gradients())
        in_order = [t.name for t in self.captured.description.tensors if t.name in norms]
        coefficient = clip_coefficient([norms[name] for name in in_order], MAX_NORM)
        for optimizer in self.optimizers:
            scale_(optimizer.gradients().values(), coefficient)
            optimizer.step(self.job.numbers.changes(step, 0))
            optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return {name: t for stage in self.stages for name, t in stage.state().items()}


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), AdamW(0.01)], ids=repr)
@pytest.mark.parametrize("name", ["cnn", "frozen", "inner_structures"])
def test_curve_and_weights_are_plain_torchs(name: str, optimizer: SGD | AdamW) -> None:
    plain = zoo.make(name)
    recipe = reference.Recipe(
        lambda parameters: optimizer.torch_class(parameters, **optimizer.arguments()),
        batch_size=BATCH,
        micro_batch=MICRO_BATCH,
        steps=STEPS,
        seed=7,
        schedule=schedule,
        clip_grad_norm=MAX_NORM,
    )
    expected = reference.train(plain.model, plain.data, plain.loss, recipe)
    made = zoo.make(name)
    job = Job(made.model, made.data, made.loss, optimizer, BATCH, seed=7, schedule=schedule)
    pipeline = Pipeline(job, captured(name))
    assert pipeline.train(STEPS) == expected.losses
    state = pipeline.state()
    assert {n for n in expected.state_dict if n not in state} <= {"unused"}
    for tensor_name, tensor in state.items():
        assert torch.equal(tensor, expected.state_dict[tensor_name]), tensor_name
