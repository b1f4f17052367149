"""How many samples are computed together, where that changes what is trained.

What is trained may not depend on who is in the house. So where the model or its loss looks across
samples, a `micro_batch` that the job leaves out is a function of the job alone, and no planner's
choice: the whole mini-batch where the loss does, `COMPUTED_TOGETHER` where only the statistics of
what is computed together do.
"""

from __future__ import annotations

from p2ptrain.errors import CaptureError
from p2ptrain.training.job import AUTO, MicroBatch
from p2ptrain.training.sharing import Across

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
            told = (
                f"{across.samples}: micro_batch is the whole mini-batch of {batch_size}. Set "
                'micro_batch for parts of it, or "auto" for parts as the plan likes, which train '
                "something else"
            )
            return batch_size, told if asked is None else ""
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
