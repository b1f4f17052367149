"""Stages chained in one process, and plain torch beside them, for comparing bits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.processor import HOST
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.stage import Stage
from p2ptrain.model.wire.tensor_codec import Unpacking, pack
from tests.support import zoo
from tests.support.reference import call, stack

BATCH = 8
MICRO_BATCH = 3  # the last micro-batch is smaller


@dataclass
class Result:
    """Of one training step: losses by micro-batch, gradients and state afterwards by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


def assert_same(plain: Result, ours: Result) -> None:
    """Losses, gradients and state, bit for bit."""
    assert [float(a) for a in ours.losses] == [float(b) for b in plain.losses]
    for name, gradient in plain.gradients.items():
        mine = ours.gradients.get(name)
        assert (mine is None) == (gradient is None), name
        assert gradient is None or torch.equal(mine, gradient), name
    for name in ours.state.keys() & plain.state.keys():
        assert torch.equal(ours.state[name], plain.state[name]), name


def captured(made: zoo.Made, *, evaluation: bool = False) -> Captured:
    """The zoo's model, captured with its first three samples; evaluating takes as long again."""
    return capture(made.model, made.loss, stack(made.data[:3]), evaluation=evaluation)


def plain_step(made: zoo.Made) -> Result:
    """One step of the contract's loop, on a copy of the model."""
    model = copy.deepcopy(made.model).train()
    losses = []
    for x, y, weight in micro_batches(made):
        loss = made.loss(call(model, x), y)
        (loss * weight).backward()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Result(losses, gradients, state)


def pipeline_step(
    made: zoo.Made,
    model: Captured,
    boundaries: Sequence[int],
    *,
    split: bool = False,
    ahead: bool = False,
    device: ComputeDevice = HOST,
    hashes: bool = False,
) -> Result:
    """The same step through stages with the given boundaries, on a device; what it gives is copied
    out.

    With `split` the inputs' gradients of all micro-batches come first, then those of the weights;
    with `ahead` all forwards come before all backwards.
    """
    shared = model.description.shared_between(boundaries)
    stages = [
        Stage(
            *(model.description, first, end, model.state()),
            tied={n: users[0] == number for n, users in shared.items() if number in users},
            device=device,
            hashes=hashes,
        )
        for number, (first, end) in enumerate(pairwise(boundaries))
    ]
    losses: list[Tensor] = []

    def backwards(key: int) -> None:
        gradients: Sequence[Tensor | None] = ()
        tied: dict[str, Tensor | None] = {}
        for number, stage in reversed([*enumerate(stages)]):
            backward = stage.backward_inputs if split else stage.backward
            here = [name for name, users in shared.items() if number in users]
            later = device.copied_in([tied.get(name) for name in here])
            made = transport(device.fetched(backward(key, device.copied_in(gradients), tied=later)))
            on = [name for name in here if shared[name][0] != number]
            gradients = made[: len(made) - len(on)]
            tied.update(zip(on, made[len(gradients) :], strict=True))

    for key, (x, y, weight) in enumerate(micro_batches(made)):
        values: list[Tensor] = model.entering(x, "train")
        targets = model.targets((x, y))
        for stage in stages:
            last = stage is stages[-1]
            outputs = stage.forward(
                key,
                _present(device.copied_in(transport(values))),
                _present(device.copied_in(targets)),
                weight=weight if last else None,
                seed=(0, 0, key),
                split=split,
            )
            values = _present(device.fetched(outputs))
        losses.append(values[0])
        if not ahead:
            backwards(key)
    for key in range(len(losses)) if ahead else ():
        backwards(key)
    for stage in stages if split else ():
        stage.backward_weights(0)
        stage.backward_weights(*range(1, len(losses)))
    assert not any(stage.held() for stage in stages)
    gradients, state = _gradients(stages, shared), joined_state(stages)
    return Result(losses, _fetched(device, gradients), _fetched(device, state))


def _present(values: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in values if value is not None]


def _fetched(device: ComputeDevice, named: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(named, device.fetched(list(named.values())), strict=True))


def evaluate(model: Captured, boundaries: Sequence[int], x: object, y: object) -> list[Tensor]:
    """Loss and output leaves of the evaluation graph through stages."""
    values = model.entering(x, "eval")
    for first, end in pairwise(boundaries):
        stage = Stage(model.description, first, end, model.state())
        values = stage.evaluate(transport(values), model.targets((x, y)))
    return values


def micro_batches(made: zoo.Made) -> list[tuple[object, object, float]]:
    """(input, target, weight) of each."""
    samples = made.data[:BATCH]
    return [
        (*stack(samples[k : k + MICRO_BATCH]), len(samples[k : k + MICRO_BATCH]) / BATCH)
        for k in range(0, BATCH, MICRO_BATCH)
    ]


def transport(values: Sequence[Any]) -> list[Any]:
    """As over the wire: new memory, the same layout."""
    return [None if value is None else _moved(value) for value in values]


def _moved(value: Tensor) -> Tensor:
    packed = pack(value)
    unpacking = Unpacking(packed.meta, (value.dtype, tuple(value.shape)))
    unpacking.buffer[:] = packed.part
    return unpacking.tensor().detach()


def _gradients(
    stages: Sequence[Stage], shared: Mapping[str, Sequence[int]]
) -> dict[str, Tensor | None]:
    """By name; of a tensor in several stages the first one's."""
    found = {name: p.grad for stage in stages for name, p in stage.parameters().items()}
    return found | {
        name: stages[users[0]].parameters()[name].grad for name, users in shared.items()
    }


def joined_state(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Parameters, buffers and constants of all stages."""
    return {name: tensor for stage in stages for name, tensor in stage.state().items()}
