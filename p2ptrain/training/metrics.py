"""Metrics over `eval_data`: computed on the holder, from the model's outputs as they come back.

An object with `update`, `compute` and `reset` (torchmetrics) is given every piece. A function is a
mean over samples, and averaged, where parts of some first outputs show that it is one; of any other
(AUROC, F1, a correlation) outputs and targets are kept, and it is computed over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from p2ptrain.errors import ScriptError
from p2ptrain.training.doings import doings
from p2ptrain.training.job import Metric, accumulates
from p2ptrain.training.user_code import RAISED, told

LOSS = "loss"
_TOLERANCE = 1e-4
"""Relative: a mean over samples, of other sums."""


class _Accumulates(Protocol):
    def update(self, output: Any, target: Any, /) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


class MetricValues:
    """The metrics of one evaluation. One that fails is left out, and named.

    Attributes:
        failures: of those that failed: name -> how.
    """

    def __init__(self, metrics: Mapping[str, Metric], over_all: frozenset[str]) -> None:
        """Begin.

        Args:
            over_all: names of functions that are no means over samples.
        """
        self.failures: dict[str, str] = {}
        self._metrics = dict(metrics)
        self._over_all = over_all
        self._sums = dict.fromkeys(metrics, 0.0)
        self._samples = 0
        self._kept: list[tuple[Any, Any]] = []
        for name, metric in self._metrics.items():
            if accumulates(metric):
                self._try(name, cast(_Accumulates, metric).reset)

    def add(self, output: Any, target: Any, samples: int) -> None:
        """One piece of the evaluation."""
        for name, metric in self._metrics.items():
            if name in self._over_all:
                continue
            if accumulates(metric):
                updated = cast(_Accumulates, metric)
                self._try(name, lambda m=updated: m.update(output, target))  # type: ignore[misc]
            else:
                value = self._try(name, lambda m=metric: number(m(output, target)))  # type: ignore[misc]
                self._sums[name] += (value or 0.0) * samples
        if self._over_all - self.failures.keys():
            self._kept.append((output, target))
        self._samples += samples

    def result(self, loss: float | None) -> dict[str, float]:
        """By name, with the loss over `eval_data` unless the job has a metric of that name.

        Without any sample a mean is NaN. None: there is no such loss.
        """
        values: dict[str, float] = {}
        whole = _joined(self._kept) if self._kept else (None, None)
        for name, metric in self._metrics.items():
            if accumulates(metric):
                made = cast(_Accumulates, metric)
                value = self._try(name, lambda m=made: number(m.compute()))  # type: ignore[misc]
            elif name in self._over_all:
                value = self._try(name, lambda m=metric: number(m(*whole)))  # type: ignore[misc]
            else:
                value = self._sums[name] / self._samples if self._samples else math.nan
            if value is not None and name not in self.failures:
                values[name] = value
        return values if loss is None else {LOSS: loss, **values}

    def _try(self, name: str, act: Callable[[], Any]) -> Any:
        if name in self.failures:
            return None
        try:
            with doings.doing("the metric {!r}", name):
                return act()
        except RAISED as error:
            self.failures[name] = told(error)
            return None


def number(value: Any) -> float:
    """What a metric gave, as a number."""
    return float(value)


def tried(metrics: Mapping[str, Metric], output: Any, target: Any) -> frozenset[str]:
    """Compute every metric once; the names of functions that are no means over samples.

    Args:
        output: of some samples, as the untrained model gives it; with their targets.

    Raises:
        ScriptError: one fails, or gives no number.
    """
    found = set()
    for name, metric in metrics.items():
        try:
            if accumulates(metric):
                _accumulated(cast(_Accumulates, metric), output, target)
                continue
            number(metric(output, target))
        except RAISED as error:
            raise ScriptError(f"the metric {name!r} failed: {told(error)}") from error
        if not _is_mean(metric, output, target):
            found.add(name)
    return frozenset(found)


def _accumulated(metric: _Accumulates, output: Any, target: Any) -> None:
    metric.reset()
    metric.update(output, target)
    number(metric.compute())
    metric.reset()


def _is_mean(metric: Callable[[Any, Any], Any], output: Any, target: Any) -> bool:
    """Whether parts average to the whole, also for outputs that belong to other samples."""
    count = _samples(output, target)
    if count < 2:
        return True
    for shift in (0, 1, count // 2):
        turned = pytree.tree_map(lambda leaf, by=shift: _turned(leaf, count, by), output)
        try:
            whole = number(metric(turned, target))
        except RAISED:  # outputs of others may be none for these targets
            continue
        for cut in {count // 2, count // 3, 1} - {0}:
            try:
                parts = [number(metric(*part)) for part in _parts(turned, target, count, cut)]
            except RAISED:  # it needs more samples, or all of them
                return False
            mean = (parts[0] * cut + parts[1] * (count - cut)) / count
            if not math.isclose(whole, mean, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) and not (
                math.isnan(whole) and math.isnan(mean)
            ):
                return False
    return True


def _samples(*values: Any) -> int:
    """How many the first dimension of tensors has; 0 where they do not agree."""
    leaves = [leaf for value in values for leaf in pytree.tree_leaves(value)]
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _turned(leaf: Any, count: int, by: int) -> Any:
    is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count
    return leaf.roll(by, 0) if is_batch and by else leaf


def _parts(output: Any, target: Any, count: int, cut: int) -> Iterator[tuple[Any, Any]]:
    for piece in (slice(0, cut), slice(cut, count)):

        def part(leaf: Any, piece: slice = piece) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count
            return leaf[piece] if is_batch else leaf

        yield pytree.tree_map(part, output), pytree.tree_map(part, target)


def _joined(kept: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """All pieces as one."""
    columns, structure = [], pytree.tree_flatten(kept[0])[1]
    for column in zip(*(pytree.tree_leaves(piece) for piece in kept), strict=True):
        is_batch = isinstance(column[0], Tensor) and column[0].dim() > 0
        columns.append(torch.cat(column) if is_batch else column[-1])
    joined: tuple[Any, Any] = pytree.tree_unflatten(columns, structure)
    return joined
