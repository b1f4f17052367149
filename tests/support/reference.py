"""Plain torch, written by the contract's rules and nothing else: what every run is compared with.

It shares no code with p2ptrain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Recipe:
    """How to train; names and defaults are the Job's.

    Attributes:
        optimizer: parameters -> a torch.optim optimizer.
        steps: most updates in all, None for no limit beyond the epochs.
        scheduler: the optimizer -> what is stepped after each update, instead of `schedule`.
        by_epoch: it is stepped after each epoch.
        before_micro_batch: called with (step, micro-batch) before each forward, to seed dropout.
        before_update: called with (step, model) before each update, to change gradients.
    """

    optimizer: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    micro_batch: int | None = None
    epochs: int = 1
    steps: int | None = None
    seed: int = 0
    schedule: Callable[[int], float] | None = None
    clip_grad_norm: float | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    by_epoch: bool = False
    before_micro_batch: Callable[[int, int], object] = field(default=lambda step, q: None)
    before_update: Callable[[int, torch.nn.Module], object] = field(default=lambda step, m: None)


@dataclass(frozen=True)
class Outcome:
    """The curve, the weights and the rates: `losses[k]` belongs to update k + 1."""

    losses: list[float]
    state_dict: dict[str, torch.Tensor]
    rates: list[Any] = field(default_factory=list)


def train(
    model: torch.nn.Module,
    data: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], torch.Tensor],
    recipe: Recipe,
) -> Outcome:
    """Train `model` in place, as anyone would who has only the contract's page and torch."""
    model.train()
    optimizer = recipe.optimizer(model.parameters())
    factor = recipe.schedule if recipe.schedule is not None else lambda update: 1.0
    make = recipe.scheduler or (lambda o: torch.optim.lr_scheduler.LambdaLR(o, factor))
    scheduler = make(optimizer)
    losses: list[float] = []
    rates: list[Any] = []
    for step, batch in enumerate(_batches(len(data), recipe)):
        total = 0.0
        for number, q in enumerate(torch.split(batch, recipe.micro_batch or recipe.batch_size)):
            recipe.before_micro_batch(step, number)
            w = len(q) / len(batch)
            x, y = stack([data[i] for i in q.tolist()])
            value = loss(call(model, x), y)
            (value * w).backward()  # type: ignore[no-untyped-call]
            total += value.item() * w
        recipe.before_update(step, model)
        if recipe.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
        used = tuple(group["lr"] for group in optimizer.param_groups)
        rates.append(used)
        optimizer.step()
        optimizer.zero_grad()
        if not recipe.by_epoch or (step + 1) % (len(data) // recipe.batch_size) == 0:
            scheduler.step()
        losses.append(total)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return Outcome(losses, state, rates)


def _batches(samples: int, recipe: Recipe) -> Iterator[torch.Tensor]:
    left = recipe.steps
    for epoch in range(recipe.epochs):
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        perm = torch.randperm(samples, generator=generator)
        for s in range(samples // recipe.batch_size):
            if left == 0:
                return
            left = None if left is None else left - 1
            yield perm[s * recipe.batch_size : (s + 1) * recipe.batch_size]


def call(model: torch.nn.Module, x: Any) -> Any:
    """A tuple is passed as `model(*x)`, a dict as `model(**x)`."""
    if isinstance(x, tuple):
        return model(*x)
    if isinstance(x, dict):
        return model(**x)
    return model(x)


def stack(samples: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Samples of nested tensors -> (inputs, targets), each with a leading batch dimension."""
    leaves = [pytree.tree_flatten(sample)[0] for sample in samples]
    columns = [torch.stack(column) for column in zip(*leaves, strict=True)]
    x, y = pytree.tree_unflatten(columns, pytree.tree_flatten(samples[0])[1])
    return x, y


def cast(data: Sequence[tuple[Any, Any]], dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """The data with every floating-point tensor in `dtype`."""

    def one(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return [pytree.tree_map(one, sample) for sample in data]
