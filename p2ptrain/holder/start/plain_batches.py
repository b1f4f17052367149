"""The job's first batches by the user's own module, and by what is captured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from p2ptrain.holder.input.batch_counts import Batch
from p2ptrain.holder.input.batch_layout import ReadBatch
from p2ptrain.holder.input.mini_batches import FirstBatches, SampleReader, batch_seed
from p2ptrain.holder.input.open_data import OpenedEvaluation
from p2ptrain.holder.start.micro_batch import COMPUTED_TOGETHER
from p2ptrain.job.job import Job
from p2ptrain.logs import get_logger, timed
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.capture.comparison import compare
from p2ptrain.model.capture.plain_run import ComparedBatches, PlainRun, run_plainly
from p2ptrain.process.memory_budget import is_out_of_memory, usable_memory_bytes

log = get_logger(__name__)

COMPARED = ComparedBatches()
"""On which the captured model is compared with the user's own."""

_NOT_COMPARED = (
    "the captured model was not compared with the module itself: there is too little memory here "
    "for another copy of its weights and their gradients"
)

_COPIES = 4
"""Of trained weights: as they were, their gradients, those before them, and values between."""


class PlainBatches:
    """What the user's own module computes on the first batches of a job.

    Args:
        news: batches that came later, of other sizes: the newest takes the place of the second.
    """

    def __init__(
        self,
        job: Job,
        samples: SampleReader,
        order: FirstBatches,
        evaluation: OpenedEvaluation | None,
        news: Sequence[ReadBatch] = (),
    ) -> None:
        self._job, self._samples, self._order, self._news = job, samples, order, news
        self._evaluated = None if evaluation is None else evaluation.samples

    def computed(self, least: int) -> PlainRun | None:
        """That; None where memory is short.

        Args:
            least: samples of a batch.
        """
        job = self._job
        if not _has_room(job.model):
            return None
        whole = job.fixed_micro_batch or min(job.batch_size, COMPUTED_TOGETHER)
        steps = len(self._samples) // job.batch_size * job.epochs
        try:
            return run_plainly(
                job.model,
                job.loss_function,
                self._batch,
                None if self._evaluated is None else self._evaluation,
                range(min(least, whole), whole + 1),
                replace(COMPARED, most=max(1, min(COMPARED.most, steps))),
                autocast=job.autocast,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _batch(self, step: int, samples: int) -> Batch:
        if step == 1 and self._news:
            return self._news[-1].rows(0, samples)
        indices = self._order.batch(step)[:samples]
        return self._samples.collate(indices, batch_seed(self._job.seed, step))

    def _evaluation(self, _: int, samples: int) -> Batch:
        assert self._evaluated is not None
        return self._evaluated.collate(range(min(samples, len(self._evaluated))), "example")


def compared(module: nn.Module, captured: Captured, run: PlainRun | None) -> tuple[str, ...]:
    """Compare what is captured with what the module has computed; a line for each rounding.

    Raises:
        CaptureError: it is another model; names what differs.
    """
    failed_for_memory = (
        run is not None and run.failure is not None and is_out_of_memory(run.failure)
    )
    if run is None or failed_for_memory or not _has_room(module):
        return (_NOT_COMPARED,)
    try:
        with timed(log, "compared"):
            found = compare(module, captured, run)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return (_NOT_COMPARED,)
    log.info("compared_batches", batches=found.batches, skipped=found.skipped)
    said = [f"other kernels than plain torch's: {found.inexact}"] if found.inexact else []
    if found.skipped:
        said.append(f"the captured model was compared on {found.batches} batches: {found.skipped}")
    return tuple(said)


def _has_room(module: nn.Module) -> bool:
    """For what the module, or what is captured, computes with weights of its own.

    No error says it where a control group has a limit: the kernel ends the process.
    """
    tensors = [*module.parameters(), *module.buffers()]
    needed_bytes = sum(t.nbytes * (_COPIES if t.requires_grad else 1) for t in tensors)
    return needed_bytes <= usable_memory_bytes()
