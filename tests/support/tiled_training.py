"""The same few steps of training by plain torch and by tiles, and how far they lie apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import InputRef
from p2ptrain.model.stage.stage import Stage
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.split_model import cut_where_tiling_ends
from p2ptrain.tiling.kernels.tileable_operators import TiledPart
from tests.support.tiled_models import CLASSES, EXAMPLES
from tests.support.tiling_in_process import Tiles, trained

SAMPLES = 2
LEARNING_RATE = 0.005
MOMENTUM = 0.9

NOISE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Gradients below this part of the model's largest are rounding: a shift that the next
normalisation takes away has none."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Prepared:
    """A network, captured and cut where tiling ends, and the batches it is trained with."""

    name: str
    module: nn.Module
    captured: Captured
    description: ModelDescription
    part: TiledPart
    batches: Sequence[Batch]


@dataclass(frozen=True, slots=True)
class Apart:
    """How far tiles lie from plain torch.

    Attributes:
        losses: largest difference of a step's loss.
        gradients: largest difference in the first step, by the largest value of each tensor.
        buffers: largest difference of a running statistic at the end.
        replicas: whether all devices have the same bits at the end.
    """

    losses: float
    gradients: float
    buffers: float
    replicas: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What a training gives: losses, the first step's gradients, the state at the end."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def prepare(name: str, dtype: torch.dtype, steps: int, seed: int = 0) -> Prepared:
    """One of `EXAMPLES` with `steps` batches; `steps` may be 1 or more."""
    example = EXAMPLES[name]
    torch.manual_seed(seed)
    module = example.build().to(dtype)
    shape = SAMPLES, 3, example.height, example.width
    batches = [
        (torch.randn(shape, dtype=dtype), torch.randint(0, CLASSES, (SAMPLES,)))
        for _ in range(steps)
    ]
    captured = capture(module, functional.cross_entropy, batches[0], evaluation=False)
    description, part = cut_where_tiling_ends(captured.description)
    return Prepared(name, module, captured, description, part, batches)


def train_plainly(prepared: Prepared, *, reverse: bool = False) -> Run:
    """Plain torch: a step of SGD for each batch.

    Args:
        prepared: the network and its batches.
        reverse: the samples of each batch in reverse order, which changes nothing but rounding.
    """
    module = copy.deepcopy(prepared.module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for x, y in prepared.batches:
        optimizer.zero_grad()
        if reverse:
            x, y = x.flip(0), y.flip(0)
        loss = functional.cross_entropy(module(x), y)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        if not first:
            first = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    return Run(losses, first, {name: t.detach() for name, t in module.state_dict().items()})


def train_tiled(prepared: Prepared, layout: GridLayout, devices: Sequence[int]) -> tuple[Run, bool]:
    """The same by tiles, each on device `devices[tile]`; the rest of the model as one stage.

    Returns:
        (what it gives, whether all devices have the same bits in the end).
    """
    description, part = prepared.description, prepared.part
    count = 1 + max(devices)
    states = [_copied(prepared.captured.state()) for _ in range(count)]
    tiles = Tiles(description, part, layout, states, device_of_tile=devices)
    behind = _copied(prepared.captured.state())
    tail = Stage(description, part.whole, len(description.units), behind, copy=False)
    optimizers = [_optimizer(trained(replica).values()) for replica in tiles.replicas]
    optimizers.append(_optimizer(tail.parameters().values()))
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for key, (x, y) in enumerate(prepared.batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(_step(prepared, tiles, tail, key, x, y))
        if not first:
            own = {**trained(tiles.replicas[0]), **tail.parameters()}
            first = {n: p.grad.clone() for n, p in own.items() if p.grad is not None}
        for optimizer in optimizers:
            optimizer.step()
    replicas = tiles.replicas
    same = all(
        torch.equal(tensor, replica[name])
        for replica in replicas
        for name, tensor in replicas[0].items()
    )
    state = {**behind, **{name: tensor.detach() for name, tensor in replicas[0].items()}}
    return Run(losses, first, state), same


def _step(prepared: Prepared, tiles: Tiles, tail: Stage, key: int, x: Tensor, y: Tensor) -> float:
    part = prepared.part
    made = dict(zip(part.network.leaving, tiles.forward(key, [x]), strict=True))
    map_of = dict(part.leaving)
    crossing = prepared.description.crossing_values(part.whole, "train")
    entering = [x if isinstance(value, InputRef) else made[map_of[value]] for value in crossing]
    (loss,) = tail.forward(key, entering, [y], weight=1.0)
    gradients: dict[int, Tensor] = {}
    for value, gradient in zip(crossing, tail.backward(key), strict=True):
        if gradient is not None and not isinstance(value, InputRef):
            number = map_of[value]
            known = gradients.get(number)
            gradients[number] = gradient if known is None else known + gradient
    tiles.backward(key, [gradients.get(number) for number in part.network.leaving])
    tiles.sum_gradients()
    return loss.item()


def compare(plain: Run, tiled: Run, replicas: bool) -> Apart:
    """Held against each other."""
    losses = max(abs(a - b) for a, b in zip(plain.losses, tiled.losses, strict=True))
    sizes = {name: gradient.abs().max().item() for name, gradient in plain.gradients.items()}
    dtype = next(iter(plain.gradients.values())).dtype
    least = NOISE[dtype] * max(sizes.values())
    gradients = max(
        (tiled.gradients[name] - expected).abs().max().item() / max(sizes[name], least)
        for name, expected in plain.gradients.items()
    )
    buffers = 0.0
    for name, expected in plain.state.items():
        if "running" in name:
            difference = (tiled.state[name] - expected).abs().max().item()
            buffers = max(buffers, difference)
        if "num_batches" in name and not torch.equal(tiled.state[name], expected):
            buffers = math.inf
    return Apart(losses, gradients, buffers, replicas)


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _optimizer(parameters) -> torch.optim.Optimizer:  # type: ignore[no-untyped-def]
    return torch.optim.SGD(list(parameters), lr=LEARNING_RATE, momentum=MOMENTUM)
