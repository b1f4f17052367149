"""A pipeline of delayed stages in one process, in the order that their schedules give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from p2ptrain.job.asynchrony import AsyncOptions, WeightDelays
from p2ptrain.model.capture.capture import capture
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.optimizer import StageOptimizer
from p2ptrain.model.stage.optimizer_spec import SGD
from p2ptrain.model.stage.stage import Stage
from p2ptrain.plan.types.schedule import ScheduleAction, one_f_one_b
from p2ptrain.plan.types.weight_versions import Weights, depths_of
from p2ptrain.recovery.version import Version
from p2ptrain.runtime.asynchronous.delayed_stage import DelayedStage
from tests.support import delayed_reference

BATCH = 8
SAMPLES = 64
OPTIMIZER = SGD(lr=0.02, momentum=0.9, weight_decay=1e-4)
GENERATION = 5
LAGS: Mapping[Weights, Callable[[int, int], int]] = {
    Weights.STASHED: lambda stage, n: n - 1 - stage,
    Weights.UNSTASHED: lambda stage, n: n - 1 - stage,
    Weights.VERTICAL: lambda stage, n: n - 1,
    Weights.DOUBLE: lambda stage, n: min(n - 1, 1),
}
"""(stage, number of stages) -> how many updates old the weights of its mini-batches are."""


class Net(nn.Module):
    """Running statistics, a frozen layer, and weights of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (6, 10, 12, 10, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh())
            for a, b in pairwise(widths)
        )
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.relu(self.frozen(x)))


def samples() -> list[tuple[Tensor, Tensor]]:
    """Enough for a few epochs to differ."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator))
        for _ in range(SAMPLES)
    ]


def network() -> Net:
    """The same one each time."""
    torch.manual_seed(0)
    return Net()


@lru_cache(maxsize=1)
def captured() -> Captured:
    """The network, exported once."""
    data = samples()[:BATCH]
    x, y = (torch.stack([one[leaf] for one in data]) for leaf in range(2))
    return capture(network(), cross_entropy, (x, y), evaluation=False)


@dataclass(frozen=True)
class Cut:
    """Copies of all stages at one version, by `model:` and `optimizer:` names."""

    version: Version
    copies: Sequence[Mapping[str, Tensor]]


@dataclass
class Pipeline:
    """Stages that give each other tensors, without threads or links."""

    stages: list[DelayedStage]

    @staticmethod
    def of(count: int, how: AsyncOptions, begin: Cut | None = None) -> Pipeline:
        """As many stages over equal parts of the units, from the first weights or from a cut."""
        whole = captured()
        units = len(whole.description.units)
        borders = [p * units // count for p in range(count + 1)]
        version = Version(0, 0) if begin is None else begin.version
        stages = []
        for p in range(count):
            model, slots = whole.state(), {}
            if begin is not None:
                parts = {kind: {} for kind in ("model", "optimizer")}
                for name, tensor in begin.copies[p].items():
                    kind, _, rest = name.partition(":")
                    parts[kind][rest] = tensor
                model, slots = parts["model"], parts["optimizer"]
            stage = Stage(whole.description, borders[p], borders[p + 1], model)
            optimizer = StageOptimizer(OPTIMIZER, stage.parameters())
            optimizer.load_state(slots)
            delays = WeightDelays(how, depths_of([1] * count), version.step)
            stages.append(DelayedStage(stage, optimizer, version, GENERATION, p, delays))
        return Pipeline(stages)

    def names(self) -> list[list[str]]:
        """By stage, what it trains."""
        return [
            [name for name, p in stage.stage.parameters().items() if p.requires_grad]
            for stage in self.stages
        ]

    def train(self, steps: int, pieces: int = 1, first: int = 0) -> list[float]:
        """Mini-batches from `first` on through an empty pipeline; their losses."""
        run = _Run(self, steps, pieces, first)
        return run.all()

    def state(self) -> dict[str, Tensor]:
        """Of the whole model, by canonical names."""
        return {n: t.detach() for s in self.stages for n, t in s.stage.state().items()}


class _Run:
    """One stretch from an empty pipeline to an empty one."""

    def __init__(self, pipeline: Pipeline, steps: int, pieces: int, first: int) -> None:
        self.stages, self.pieces, self.first = pipeline.stages, pieces, first
        recipe = delayed_reference.Recipe(
            OPTIMIZER.build, BATCH, first + steps, micro_batch=BATCH // pieces
        )
        self.batches = list(delayed_reference.batches(samples(), recipe))[first:]
        count, total = len(self.stages), steps * pieces
        self.orders = [
            [a for a in one_f_one_b(max(total, count), count - p) if a.micro_batch < total]
            for p in range(count)
        ]
        self.activations: dict[tuple[int, int], list[Tensor]] = {}
        self.gradients: dict[tuple[int, int], list[Tensor | None]] = {}
        self.losses = [0.0] * steps
        for stage in self.stages:
            stage.begin()

    def all(self) -> list[float]:
        """Each that can goes on, the last stage first, until all is done."""
        while any(self.orders):
            for p in reversed(range(len(self.stages))):
                if self.orders[p] and self._can(p, self.orders[p][0]):
                    self._do(p, self.orders[p].pop(0))
                    break
            else:
                raise AssertionError("nobody can go on")
        return self.losses

    def _can(self, p: int, action: ScheduleAction) -> bool:
        if action.kind == "forward":
            return p == 0 or (p, action.micro_batch) in self.activations
        return p == len(self.stages) - 1 or (p, action.micro_batch) in self.gradients

    def _do(self, p: int, action: ScheduleAction) -> None:
        (self._forward if action.kind == "forward" else self._backward)(p, action.micro_batch)

    def _forward(self, p: int, number: int) -> None:
        made, piece = divmod(number, self.pieces)
        x, y = self.batches[made][piece]
        is_last_stage = p == len(self.stages) - 1
        outputs = self.stages[p].forward(
            number,
            self.first + made,
            [x] if p == 0 else self.activations.pop((p, number)),
            [y] if is_last_stage else [],
            weight=len(y) / BATCH if is_last_stage else None,
            seed=(0, self.first + made, piece),
            is_last=piece == self.pieces - 1,
        )
        if is_last_stage:
            self.losses[made] += outputs[0].item() * (len(y) / BATCH)
        else:
            self.activations[p + 1, number] = outputs

    def _backward(self, p: int, number: int) -> None:
        stage = self.stages[p]
        gradients: Sequence[Any] = self.gradients.pop((p, number), ())
        result = stage.stage.backward(number, gradients)
        if p:
            self.gradients[p - 1, number] = result
        if (number + 1) % self.pieces == 0:
            step = self.first + number // self.pieces
            stage.check_step(step)
            stage.update(stage.gradients(step), {})
