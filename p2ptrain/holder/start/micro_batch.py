"""Sizes of micro-batches that the model prescribes, whichever devices take part.

Which devices are in the household must not change what is trained. So where the model or its loss
looks across samples, a `micro_batch` that the job leaves out is a function of the job alone: the
whole mini-batch where the loss does, `COMPUTED_TOGETHER` where only batch statistics do.

Some models have a minimum micro-batch: BatchNorm needs two samples, and so does `.squeeze()`, which
drops a batch of one too; a loss over the hardest eight needs eight. No plan makes a smaller one
and no profile measures one. Where the job's own sizes make smaller ones, plain torch decides: what
it computes is trained, what it refuses is refused before any other device is asked.

Some have a maximum, as diffusers' U-Nets, which ask whether there are 64 or more: what is captured
is what they do with fewer, and no micro-batch is larger.
"""

from __future__ import annotations

import torch

from p2ptrain.errors import CaptureError
from p2ptrain.holder.input.mini_batches import SampleReader, too_few
from p2ptrain.holder.start.loss_count import Across
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import AUTO, Job, MicroBatch
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failing_unit, first_line
from p2ptrain.model.stage.program import Program
from p2ptrain.model.stage.stage import NO_SEED

COMPUTED_TOGETHER = 32


def settled(asked: MicroBatch, batch_size: int, across: Across) -> tuple[int | None, str]:
    """The micro-batch of a job, None where the planner chooses it; and what that changes, or "".

    Args:
        asked: as the job has it; None = it leaves it out.

    Raises:
        CaptureError: the loss is a sum over the batch, and it would be computed in parts.
    """
    size = asked if isinstance(asked, int) else None
    if across.samples:
        whole = asked is None or size == batch_size
        if across.sum_of and not whole:
            raise CaptureError(_sum_in_parts(size, batch_size))
        if whole:
            reason = (
                f"{across.samples}: micro_batch is the whole mini-batch of {batch_size}. Set "
                'micro_batch for parts of it, or "auto" for parts as the plan likes, which train '
                "something else"
            )
            return batch_size, reason if asked is None else ""
        parts = "parts as the plan likes" if size is None else f"parts of {size}"
        return size, (
            f"{across.samples}: the mini-batch of {batch_size} is computed in {parts}, which "
            f"trains something else than the whole. Set micro_batch={batch_size} for that"
        )
    if across.statistics and asked is None:
        size = min(COMPUTED_TOGETHER, batch_size)
        return size, (
            f"{across.statistics}: micro_batch is {size} on any household. Set another one, or "
            '"auto" for the fastest of each plan'
        )
    if across.statistics and asked == AUTO:
        return (
            None,
            f"{across.statistics}: micro_batch is the plan's, so results depend on who is here",
        )
    return size, ""


def _sum_in_parts(size: int | None, batch_size: int) -> str:
    factor = "as many times too small as it has parts" if size is None else _times(size, batch_size)
    return (
        "the loss is a sum over the samples of the batch, not their mean. Computed in "
        f"{'micro-batches' if size is None else f'micro-batches of {size}'}, each weighed by its "
        f"share of the batch, its gradients would be {factor}. Take the mean over the samples, or "
        f"set micro_batch={batch_size}, the whole mini-batch"
    )


def _times(size: int, batch_size: int) -> str:
    return f"{batch_size / size:g} times too small"


def within(micro_batch: int | None, batch_size: int, captured: Captured) -> int | None:
    """`micro_batch`, or one of the samples that the graph is for where the planner's may be more.

    Raises:
        CaptureError: it is too large itself.
    """
    most = captured.most
    if most is None or (micro_batch or batch_size) <= most:
        return micro_batch
    if micro_batch is not None:
        raise CaptureError(_too_many(micro_batch, most))
    return min(COMPUTED_TOGETHER, most)


def _too_many(samples: int, most: int, number: str = "micro_batch") -> str:
    return (
        f"the model asks how many samples it is given, and may do something else with {samples} "
        f"than with up to {most}, for which it is captured: set {number} to {most} or fewer"
    )


def min_micro_batch(
    job: Job, captured: Captured, samples: SampleReader, how: AsyncOptions | None
) -> int:
    """The fewest samples that a micro-batch of the job may have.

    Args:
        how: it certainly trains without a barrier, which may fix the size of its micro-batches.

    Raises:
        CaptureError: the job's own sizes make a smaller one, which the model cannot compute.
    """
    least, smallest = captured.trains.least, _smallest(job, how)
    if how is not None and (too_many := _too_many_in_async(job, captured, how)):
        raise CaptureError(too_many)
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


def check_fewest(job: Job, fewest: int, least: int) -> None:
    """Raises CaptureError: the smallest batch of a loader makes a micro-batch that is too small."""
    size = job.fixed_micro_batch or fewest
    piece = fewest % size or min(size, fewest)
    if piece < least:
        raise CaptureError(too_few("the smallest batch of the data", fewest, piece, least))


def check_evaluation_sizes(captured: Captured, evaluation: SampleReader | None) -> None:
    """Raises CaptureError: `evaluation` has fewer samples than the model is known for."""
    known = captured.evaluates.known
    if evaluation is not None and len(evaluation) < known:
        raise CaptureError(
            f"eval_data has {len(evaluation)} samples, and the model may do something else with "
            f"fewer than {known}: give it more"
        )


def why_synchronous_only(job: Job, captured: Captured, least: int, how: AsyncOptions) -> str:
    """Why a job that may train without a barrier cannot: the size of its pieces; else ""."""
    size = _smallest(job, how)
    if size >= least:
        return _too_many_in_async(job, captured, how)
    return f"without a barrier a micro-batch would have {size} samples, and the model needs {least}"


def _too_many_in_async(job: Job, captured: Captured, how: AsyncOptions) -> str:
    """Why what travels without a barrier is too large for the model; "" where it is not."""
    size, most = how.piece(job.batch_size, job.fixed_micro_batch), captured.most
    if most is None or size <= most:
        return ""
    return _too_many(size, most, "batch_size")


def _smallest(job: Job, how: AsyncOptions | None) -> int:
    """Of micro-batches whose size the job prescribes; the whole batch where the planner chooses."""
    size = job.fixed_micro_batch or job.batch_size
    if how is not None:
        size = how.piece(job.batch_size, job.fixed_micro_batch)
    return job.batch_size % size or size


def _failure(captured: Captured, samples: SampleReader, size: int) -> str | None:
    """Why the first `size` samples do not go through the graph and back; None where they do."""
    batch = samples.collate(list(range(size)))
    description, state = captured.description, captured.state()
    for tensor in description.tensors:
        state[tensor.name] = state[tensor.name].clone().requires_grad_(tensor.trainable)
    program = Program(description, 0, len(description.units), "train", state)
    leaves = captured.entering(batch[0], "train"), captured.targets(batch)
    try:
        torch.autograd.backward(program.run(*leaves, NO_SEED)[0])
    except OPERATORS_RAISE as error:
        unit = failing_unit(error)
        return f"{'' if unit is None else f'layer {unit}: '}{first_line(error)}"
    if size < captured.trains.known:
        return f"it may do something else with fewer than {captured.trains.known}"
    return None
