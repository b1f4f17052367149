"""Metrics over `eval_data`: computed on the holder, from the model's outputs as they come back.

An object with `update`, `compute` and `reset` (torchmetrics) receives every micro-batch. A function
is averaged where parts of some first outputs show that it is a mean over samples. For any other
(AUROC, F1, a correlation) outputs and targets are kept, and it is computed over all of them.
Metrics are tried before training begins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from p2ptrain.errors import CaptureError, ScriptError, size_text
from p2ptrain.holder.input.mini_batches import SampleReader
from p2ptrain.job.job import LOSS, Job, Metric, accumulates
from p2ptrain.job.user_code import RAISED, describe_user_error, doings
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.sample_independence.division_probe import with_own_buffers
from p2ptrain.model.stage.failures import OPERATORS_RAISE
from p2ptrain.model.stage.program import Program
from p2ptrain.model.stage.random_operators import randomness_lock
from p2ptrain.model.stage.stage import NO_SEED
from p2ptrain.process.memory_budget import usable_memory_bytes

UPDATE_BYTES = 64 << 20
"""Of outputs and targets, after which an object is updated before its batch is complete."""

_TOLERANCE = 1e-4
"""Relative: a mean over samples, of other sums."""


class _Accumulates(Protocol):
    def update(self, output: Any, target: Any, /) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


class MetricValues:
    """The metrics and the loss of one evaluation. A metric that fails is left out, and named.

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
        self._loss, self._loss_samples = 0.0, 0
        self._kept: list[tuple[Any, Any]] = []
        self._updated = {n: cast(_Accumulates, m) for n, m in metrics.items() if accumulates(m)}
        self._batch: list[tuple[Any, Any]] = []  # pieces with which they are to be updated
        self._batch_bytes = 0
        for name, updated in self._updated.items():
            self._try(name, updated.reset)

    def add(self, output: Any, target: Any, samples: int, *, ends_batch: bool = True) -> None:
        """One piece of the evaluation; `ends_batch`: the next one is of another batch.

        Objects are updated batch by batch, as in a loop of plain torch: some, torchmetrics' too,
        look at all they are given to find out what it is. Large batches come in parts.
        """
        for name, metric in self._metrics.items():
            if name in self._over_all or name in self._updated:
                continue
            value = self._try(name, lambda m=metric: number(m(output, target)))  # type: ignore[misc]
            self._sums[name] += (value or 0.0) * samples
        if self._updated:
            self._batch.append((output, target))
            leaves = pytree.tree_leaves((output, target))
            self._batch_bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            if ends_batch or self._batch_bytes > UPDATE_BYTES:
                self._update()
        if self._over_all - self.failures.keys():
            self._kept.append((output, target))
        self._samples += samples

    def add_loss(self, loss: float, samples: int) -> None:
        """Of a round: the mean over its samples."""
        self._loss_samples += samples
        share = samples / self._loss_samples
        self._loss = loss if share == 1.0 else self._loss + (loss - self._loss) * share

    def _update(self) -> None:
        pieces, self._batch, self._batch_bytes = self._batch, [], 0
        if len(pieces) > 1:
            with contextlib.suppress(RuntimeError):  # of several shapes
                pieces = [_joined(pieces)]
        for name, updated in self._updated.items():
            for piece in pieces:
                self._try(name, lambda m=updated, given=piece: m.update(*given))  # type: ignore[misc]

    def result(self, *, has_loss: bool) -> dict[str, float]:
        """By name, with the loss over `eval_data` unless the job has a metric of that name.

        Without any sample a mean is NaN.
        """
        values: dict[str, float] = {}
        whole: list[tuple[Any, Any]] = []  # put together where a metric needs it

        def over_all(metric: Callable[[Any, Any], Any]) -> float:
            if not whole:
                whole.append(_joined(self._kept) if self._kept else (None, None))
            return number(metric(*whole[0]))

        for name, metric in self._metrics.items():
            if accumulates(metric):
                made = cast(_Accumulates, metric)
                value = self._try(name, lambda m=made: number(m.compute()))  # type: ignore[misc]
            elif name in self._over_all:
                value = self._try(name, lambda m=metric: over_all(m))  # type: ignore[misc]
            else:
                value = self._sums[name] / self._samples if self._samples else math.nan
            if value is not None and name not in self.failures:
                values[name] = value
        return {LOSS: self._loss, **values} if has_loss else values

    @property
    def said(self) -> list[str]:
        """A sentence for each metric that has failed."""
        return [
            f"the metric {name!r} failed, and is left out: {how}"
            for name, how in self.failures.items()
        ]

    def _try(self, name: str, act: Callable[[], Any]) -> Any:
        if name in self.failures:
            return None
        try:
            with doings.doing("the metric {!r}", name):
                return act()
        except RAISED as error:
            self.failures[name] = describe_user_error(error)
            return None


def check_measured(job: Job, step: int, found: Mapping[str, float]) -> None:
    """Raises ScriptError: a scheduler waits for a metric that the evaluation did not give."""
    name = job.scheduler_metric
    if job.numbers.needs_metric and name not in found:
        raise ScriptError(
            f"the scheduler waits for the metric {name!r}, which the evaluation after step "
            f"{step} did not give"
        )


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
            raise ScriptError(
                f"the metric {name!r} failed: {describe_user_error(error)}"
            ) from error
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


SAMPLES = 64
"""Of `eval_data` on which metrics are tried, as far apart as can be."""

KEPT_SHARE = 0.25
"""Of free memory, for outputs that metrics over all of `eval_data` need."""


def check_evaluation(metrics: Mapping[str, Metric], captured: Captured) -> None:
    """Refuse an evaluation that has nothing to say, or nothing to give to its metrics.

    Raises:
        CaptureError: says what the model returns in evaluation mode and what to change.
    """
    if metrics and captured.foreign_output:
        raise CaptureError(
            f"the model returns {captured.foreign_output[0].what} in evaluation mode, which cannot "
            "be given to metrics: they take tensors, numbers and strings, in tuples, lists, named "
            "tuples and dicts as deep as you like (and in dataclasses for which "
            "torch.export.register_dataclass was called). Return those"
        )
    if captured.unscored and not metrics:
        raise CaptureError(
            "the loss does not take what the model returns in evaluation mode, and the job has no "
            "metrics, so there is nothing to evaluate: add metrics, leave out eval_data, or write "
            f"a loss that takes both outputs ({captured.unscored})"
        )


def missing_loss(metrics: Mapping[str, Metric], captured: Captured) -> str:
    """The message about a loss that evaluations lack; "" where they have one."""
    if not captured.unscored or LOSS in metrics:
        return ""
    return (
        "evaluations give the metrics without the loss, which does not take what the model "
        f"returns in evaluation mode ({captured.unscored}). For a loss there too, write one that "
        f"takes both outputs, or add a metric called {LOSS!r}"
    )


def tried_metrics(
    metrics: Mapping[str, Metric], captured: Captured, evaluation: SampleReader
) -> frozenset[str]:
    """Compute every metric once, with the untrained model's outputs.

    Returns:
        The names of those that are computed over all of `evaluation`: they are no means.

    Raises:
        ScriptError: one fails, or needs more memory for that than there is.
    """
    if not metrics:
        return frozenset()
    count = min(len(evaluation), max(SAMPLES, captured.evaluates.least))
    chosen = [k * len(evaluation) // count for k in range(count)]
    inputs, target = evaluation.collate(chosen)
    description = captured.description
    state = with_own_buffers(description, captured.state())
    program = Program(description, 0, len(description.units), "eval", state)
    entering, targets = captured.entering(inputs, "eval"), captured.targets((inputs, target))
    try:
        with torch.no_grad():
            _, *leaves = program.run(entering, targets, NO_SEED)
    except OPERATORS_RAISE:
        return frozenset()  # training and evaluations say it, with unit and step
    with randomness_lock:
        of_metrics = inputs if target is None else target
        over_all = tried(metrics, captured.unflatten_output(leaves), of_metrics)
    kept_bytes = sum(leaf.nbytes for leaf in (*leaves, *targets)) // count * len(evaluation)
    if over_all and kept_bytes > KEPT_SHARE * usable_memory_bytes():
        raise ScriptError(
            f"the metric {min(over_all)!r} is no mean over samples, and keeping what the model "
            f"gives for all of eval_data takes {size_text(kept_bytes)}: write it as an object with "
            "update(output, target), compute() and reset(), as torchmetrics has them"
        )
    return over_all
