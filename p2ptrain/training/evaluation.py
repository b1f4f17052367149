"""What an evaluation can say, tried before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from p2ptrain.errors import CaptureError, ScriptError
from p2ptrain.model.captured import Captured
from p2ptrain.model.division_probe import with_own_buffers
from p2ptrain.model.program import Program
from p2ptrain.model.randomness import randomness_lock
from p2ptrain.model.stage import NO_SEED
from p2ptrain.size_text import size_text
from p2ptrain.training.budget import usable_memory_bytes
from p2ptrain.training.data import Samples
from p2ptrain.training.job import Metric
from p2ptrain.training.metrics import LOSS, tried
from p2ptrain.training.operator_errors import OPERATORS_RAISE

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
    """What to tell people of a loss that evaluations lack; "" where they have one."""
    if not captured.unscored or LOSS in metrics:
        return ""
    return (
        "evaluations give the metrics without the loss, which does not take what the model "
        f"returns in evaluation mode ({captured.unscored}). For a loss there too, write one that "
        f"takes both outputs, or add a metric called {LOSS!r}"
    )


def tried_metrics(
    metrics: Mapping[str, Metric], captured: Captured, evaluation: Samples
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
    inputs, target = evaluation.collate(chosen, "example")
    description = captured.description
    state = with_own_buffers(description, captured.state())
    program = Program(description, 0, len(description.units), "eval", state)
    entering, targets = captured.entering(inputs, "eval"), captured.flatten_target(target)
    try:
        with torch.no_grad():
            _, *leaves = program.run(entering, targets, NO_SEED)
    except OPERATORS_RAISE:
        return frozenset()  # training and evaluations say it, with unit and step
    with randomness_lock:
        over_all = tried(metrics, captured.unflatten_output(leaves), target)
    kept_bytes = sum(leaf.nbytes for leaf in (*leaves, *targets)) // count * len(evaluation)
    if over_all and kept_bytes > KEPT_SHARE * usable_memory_bytes():
        raise ScriptError(
            f"the metric {min(over_all)!r} is no mean over samples, and keeping what the model "
            f"gives for all of eval_data takes {size_text(kept_bytes)}: write it as an object with "
            "update(output, target), compute() and reset(), as torchmetrics has them"
        )
    return over_all
