"""How few samples a micro-batch may have: a plan makes no smaller one, and no profile measures one.

BatchNorm needs two samples, and so does `.squeeze()`, which drops a batch of one too; a loss over
the hardest eight needs eight. Where the job's own sizes make fewer, plain torch decides: what it
computes is trained as it is, what it refuses is refused before any other device is asked.
"""

from __future__ import annotations

import torch

from p2ptrain.errors import CaptureError
from p2ptrain.model.captured import Captured
from p2ptrain.model.program import Program
from p2ptrain.model.stage import NO_SEED
from p2ptrain.training.asynchronous.delays import Asynchrony
from p2ptrain.training.data import Samples
from p2ptrain.training.job import Job
from p2ptrain.training.operator_errors import OPERATORS_RAISE, first_line, unit_of


def least_piece(job: Job, captured: Captured, samples: Samples, how: Asynchrony | None) -> int:
    """The fewest samples that a micro-batch of the job may have.

    Args:
        how: it certainly trains without a barrier, which may fix the size of its micro-batches.

    Raises:
        CaptureError: the job's own sizes make a smaller one, which the model cannot compute.
    """
    least, smallest = captured.trains.least, _smallest(job, how)
    if smallest >= least:
        return least
    if smallest == 1 and captured.trains.refuses_one:
        raise CaptureError(
            "a BatchNorm of the model cannot work on a micro-batch of one sample: choose "
            "micro_batch so that neither it nor what remains of batch_size is 1"
        )
    why = _failure(captured, samples, smallest)
    if why is None:
        return smallest
    few, such = (f"{smallest} samples", "so few") if smallest > 1 else ("1 sample", "one")
    raise CaptureError(
        f"the model cannot train on {few} ({why}), and this job has a micro-batch of {such}: "
        "choose batch_size and micro_batch so that neither micro_batch nor what remains of "
        f"batch_size is below {least}"
    )


def check_evaluation_sizes(captured: Captured, evaluation: Samples | None) -> None:
    """Raises CaptureError: `evaluation` has fewer samples than the model is known for."""
    known = captured.evaluates.known
    if evaluation is not None and len(evaluation) < known:
        raise CaptureError(
            f"eval_data has {len(evaluation)} samples, and the model may do something else with "
            f"fewer than {known}: give it more"
        )


def why_only_rounds(job: Job, least: int, how: Asynchrony) -> str:
    """Why a job that may train without a barrier cannot: its pieces would be too small; else ""."""
    size = _smallest(job, how)
    if size >= least:
        return ""
    return f"without a barrier a micro-batch would have {size} samples, and the model needs {least}"


def _smallest(job: Job, how: Asynchrony | None) -> int:
    """Of the micro-batches that nobody chooses; the whole batch where the planner does."""
    size = job.fixed_micro_batch or job.batch_size
    if how is not None:
        size = how.piece(job.batch_size, job.fixed_micro_batch)
    return job.batch_size % size or size


def _failure(captured: Captured, samples: Samples, size: int) -> str | None:
    """Why the first `size` samples do not go through the graph and back; None where they do."""
    inputs, targets = samples.collate(list(range(size)), "example")
    description, state = captured.description, captured.state()
    for tensor in description.tensors:
        state[tensor.name] = state[tensor.name].clone().requires_grad_(tensor.trainable)
    program = Program(description, 0, len(description.units), "train", state)
    leaves = captured.entering(inputs, "train"), captured.flatten_target(targets)
    try:
        torch.autograd.backward(program.run(*leaves, NO_SEED)[0])
    except OPERATORS_RAISE as error:
        unit = unit_of(error)
        return f"{'' if unit is None else f'layer {unit}: '}{first_line(error)}"
    if size < captured.trains.known:
        return f"it may do something else with fewer than {captured.trains.known}"
    return None
