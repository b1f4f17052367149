"""Metrics over `eval_data`: computed on the holder, piece by piece, averaged by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from p2ptrain.errors import ScriptError
from p2ptrain.training.job import Metric
from p2ptrain.training.user_code import told

LOSS = "loss"


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
            except Exception as error:
                raise ScriptError(f"the metric {name!r} failed: {told(error)}") from error
            self._sums[name] += value * samples
        self._samples += samples

    def result(self, loss: float) -> dict[str, float]:
        """Means by name, with the loss over `eval_data` unless the job has a metric of that name.

        Without any sample a mean is NaN.
        """
        means = {
            name: total / self._samples if self._samples else math.nan
            for name, total in self._sums.items()
        }
        return {LOSS: loss, **means}
