"""Metrics over `eval_data`: computed on the holder, piece by piece, averaged by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.model.captured import Captured
from p2ptrain.training.job import Metric
from p2ptrain.training.user_code import RAISED, told

LOSS = "loss"


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
    """What to tell people of a loss that evaluations lack; "" where they have one."""
    if not captured.unscored or LOSS in metrics:
        return ""
    return (
        "evaluations give the metrics without the loss, which does not take what the model "
        f"returns in evaluation mode ({captured.unscored}). For a loss there too, write one that "
        f"takes both outputs, or add a metric called {LOSS!r}"
    )


class MetricMeans:
    """Running means, weighted by the number of samples."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._sums = dict.fromkeys(metrics, 0.0)
        self._samples = 0

    def add(self, output: Any, target: Any, samples: int) -> None:
        """One piece. Raises ScriptError if a metric fails or does not give a number."""
        for name, metric in self._metrics.items():
            try:
                value = float(metric(output, target))
            except RAISED as error:
                raise ScriptError(f"the metric {name!r} failed: {told(error)}") from error
            self._sums[name] += value * samples
        self._samples += samples

    def result(self, loss: float | None) -> dict[str, float]:
        """Means by name, with the loss over `eval_data` unless the job has a metric of that name.

        Without any sample a mean is NaN. None: there is no such loss.
        """
        means = {
            name: total / self._samples if self._samples else math.nan
            for name, total in self._sums.items()
        }
        return means if loss is None else {LOSS: loss, **means}
