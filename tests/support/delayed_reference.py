"""Asynchronous training in plain torch, by the papers' formulas: what every such run must equal.

It shares no code with p2ptrain on purpose. One device has the whole model; it keeps every version
that the parameters of each stage ever had, and computes mini-batch after mini-batch:

    w(t+1) = w(t) - step( gradient of f at (w_0(t-d_0), ..., w_n-1(t-d_n-1)), momentum )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.support.reference import Outcome, stack

Names = Sequence[Sequence[str]]
"""By stage, the names of its parameters."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        optimizer: parameters -> a torch.optim optimizer.
        micro_batch: samples of a piece; None = the mini-batch travels whole.
        steps: updates in all.
        lag: (stage, number of stages) -> how many updates old the weights of its mini-batches are.
        devices: updates after which the pipeline began empty -> of each stage, where some have
            several that take mini-batches in turn: then weights are as old as there are other
            devices in that stage and the later ones.
        aggregate: k: after every k * (n - p) updates stage p goes on from the mean of its n - p
            newest versions; None = never.
        stashes: False = backwards use the newest weights instead of those of the forward.
        empty: updates after which the pipeline began empty -> how it is cut from there on.
    """

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    steps: int
    lag: Callable[[int, int], int] = lambda stage, stages: stages - 1 - stage
    devices: Mapping[int, Sequence[int]] = field(default_factory=dict)
    micro_batch: int | None = None
    aggregate: int | None = None
    stashes: bool = True
    seed: int = 0
    schedule: Callable[[int], float] = lambda update: 1.0
    empty: Mapping[int, Names] = field(default_factory=dict)


class _Trainer:
    """The model, its optimizer, and every version since the pipeline was empty."""

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Tensor], names: Names, recipe: Recipe
    ) -> None:
        self.model, self.loss, self.recipe = model, loss, recipe
        self.own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = recipe.optimizer(list(self.own.values()))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self._begin(0, names)

    def _begin(self, t: int, names: Names) -> None:
        self.start = t
        self.names = [[name for name in stage if name in self.own] for stage in names]
        self.history = [{t: self._copy(stage)} for stage in self.names]

    def _copy(self, stage: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.own[name].detach().clone() for name in stage}

    def step(self, t: int, pieces: Sequence[tuple[Any, Any]]) -> float:
        if t in self.recipe.empty:
            self._begin(t, self.recipe.empty[t])
        samples = sum(len(y) for _, y in pieces)
        leaves = self._leaves(t)
        total = 0.0
        for x, y in pieces:
            w = len(y) / samples
            value = self.loss(functional_call(self.model, leaves, (x,)), y)
            if not self.recipe.stashes:
                for name, leaf in leaves.items():  # past autograd, which would rightly object
                    leaf.data.copy_(self.own[name].detach())
            (value * w).backward()  # type: ignore[no-untyped-call]
            total += value.item() * w
        self._update(t, leaves)
        return total

    def _leaves(self, t: int) -> dict[str, Tensor]:
        n = len(self.names)
        leaves = {}
        for p, stage in enumerate(self.names):
            lag = self.recipe.lag(p, n)
            if self.start in self.recipe.devices:
                lag = sum(self.recipe.devices[self.start][p:]) - 1
            seen = max(self.start, t - lag)
            for name in stage:
                leaves[name] = self.history[p][seen][name].clone().requires_grad_()
        return leaves

    def _update(self, t: int, leaves: Mapping[str, Tensor]) -> None:
        for name, leaf in leaves.items():
            self.own[name].grad = leaf.grad
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.recipe.schedule(t)
        self.optimizer.step()
        for p, stage in enumerate(self.names):
            self.history[p][t + 1] = self._copy(stage)
            depth, every = len(self.names) - p, self.recipe.aggregate
            if every and depth > 1 and (t + 1 - self.start) % (every * depth) == 0:
                self._average(stage, [self.history[p][v] for v in range(t + 2 - depth, t + 2)])
                self.history[p][t + 1] = self._copy(stage)

    def _average(self, stage: Sequence[str], versions: Sequence[Mapping[str, Tensor]]) -> None:
        for name in stage:
            mean = versions[0][name].clone()
            for version in versions[1:]:
                mean += version[name]
            self.own[name].data.copy_(mean / len(versions))


def train(
    model: nn.Module,
    data: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    names: Names,
    recipe: Recipe,
    updated: Callable[[int], object] = lambda updates: None,
    course: Iterable[Sequence[tuple[Any, Any]]] = (),
) -> Outcome:
    """Train `model` in place; names of parameters by stage say how it is cut.

    Args:
        updated: is called after each update with their number; `model` has the newest weights then.
        course: the pieces of every mini-batch, where they are not those of `data`.
    """
    model.train()
    trainer = _Trainer(model, loss, names, recipe)
    losses = []
    for t, pieces in enumerate(course or batches(data, recipe)):
        losses.append(trainer.step(t, pieces))
        updated(t + 1)
    return Outcome(losses, {k: v.detach().clone() for k, v in model.state_dict().items()})


def batches(
    data: Sequence[tuple[Any, Any]], recipe: Recipe
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The pieces of every mini-batch, in the contract's order."""
    left, epoch, size = recipe.steps, 0, recipe.batch_size
    while left:
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(len(data), generator=generator)
        for s in range(min(left, len(data) // size)):
            indices = order[s * size : (s + 1) * size].split(recipe.micro_batch or size)
            yield [stack([data[i] for i in piece.tolist()]) for piece in indices]
            left -= 1
        epoch += 1
