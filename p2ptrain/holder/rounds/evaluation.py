"""One evaluation of a job's `eval_data`, while its outputs and losses come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.metrics import MetricValues
from p2ptrain.holder.start.prepared_job import PreparedJob


class RunningEvaluation:
    """The job's metrics and its loss, each over all samples of the evaluation."""

    def __init__(self, prepared: PreparedJob) -> None:
        self._job, self._captured = prepared.job, prepared.captured
        self._metrics = MetricValues(prepared.job.metrics, prepared.over_all)
        self._loss, self._samples = 0.0, 0

    def add_output(
        self, leaves: Sequence[Tensor], target: object, samples: int, *, ends_batch: bool
    ) -> None:
        """Give the metrics a micro-batch: the leaves of the model's output, and its target."""
        output = self._captured.unflatten_output(leaves)
        self._metrics.add(output, target, samples, ends_batch=ends_batch)

    def add_loss(self, loss: float, samples: int) -> None:
        """Add a round: the mean over its samples."""
        self._samples += samples
        share = samples / self._samples
        self._loss = loss if share == 1.0 else self._loss + (loss - self._loss) * share

    def result(self) -> dict[str, float]:
        """By name; `loss` is one of them where the evaluated model has one."""
        return self._metrics.result(None if self._captured.unscored else self._loss)

    @property
    def failures(self) -> list[str]:
        """A sentence for each metric that has failed."""
        return [
            f"the metric {name!r} failed, and is left out: {how}"
            for name, how in self._metrics.failures.items()
        ]

    def check_metric(self, step: int, found: Mapping[str, float]) -> None:
        """Raises ScriptError: a scheduler waits for a metric that the evaluation did not give."""
        name = self._job.scheduler_metric
        if self._job.numbers.needs_metric and name not in found:
            raise ScriptError(
                f"the scheduler waits for the metric {name!r}, which the evaluation after step "
                f"{step} did not give"
            )
