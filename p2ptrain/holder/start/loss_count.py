"""What a job's loss counts, and whether that is all there is to it: found before the plan.

    normalizer given                                    that
    one mean of torch's over classified targets         those it does not leave out, class weights
    any other loss                                      samples

Whatever is found is tried: parts of some samples, so weighed, must add up to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from p2ptrain.errors import ScriptError
from p2ptrain.holder.input.batch_counts import (
    Batch,
    BatchCount,
    NormalizerCount,
    TargetCount,
    rows,
    samples_of,
    weigh,
)
from p2ptrain.holder.input.mini_batches import SampleReader
from p2ptrain.holder.start.model_limits import (
    SEEN,
    Across,
    few_samples,
    looks_across,
    uncounted,
)
from p2ptrain.job.data_kinds import is_map_style
from p2ptrain.job.job import Job
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.sample_independence.class_losses import ClassLosses, entered
from p2ptrain.model.sample_independence.division_probe import HalfWeights, alike, in_double

READ_WHOLE_BYTES = 64 << 20
"""Of a mini-batch. A larger one is read micro-batch by micro-batch as long as the data shows no
target that is left out, since what all of it counts is known once all of it is read."""


@dataclass(frozen=True, slots=True)
class LossCount:
    """What is found.

    Attributes:
        count: what weighs micro-batches; None = their samples do.
        across: where model or loss look across samples in a way that `count` does not cover.
        unweighed: losses that may leave targets out for which `count` does not account: none has
            been found yet.
    """

    count: BatchCount | None
    across: Across
    unweighed: ClassLosses | None


def find_count(job: Job, captured: Captured, samples: SampleReader, example: Batch) -> LossCount:
    """Look at the graph and at `SEEN` samples, and try some.

    Raises:
        ScriptError: the normalizer, or the model, fails with these samples.
    """
    losses = ClassLosses(captured.description, captured.state())
    count = _count(job, captured, losses, example)
    is_ignored = losses.leaves_out_a_class or _leaves_out(captured, samples, losses)
    across = _across(captured, samples, losses, count, is_ignored=is_ignored)
    found = LossCount(count, across, losses if across.leaves_out else None)
    if job.normalizer is not None or count is None or is_ignored or losses.weighs_classes:
        return found
    if next(iter(samples.ready_pieces()), None) is not None:  # all of it was looked at
        return replace(found, count=None, unweighed=None)
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    sample_bytes = sum(tensor.nbytes for tensor in tensors) // samples_of(example)
    if is_map_style(job.data) and job.batch_size * sample_bytes > READ_WHOLE_BYTES:
        return replace(found, count=None, unweighed=losses)
    return found


def spread(samples: SampleReader) -> list[int]:
    """`SEEN` indices, as far apart as can be."""
    return [k * len(samples) // SEEN for k in range(SEEN)]


def _count(job: Job, captured: Captured, losses: ClassLosses, example: Batch) -> BatchCount | None:
    if job.normalizer is None:
        return TargetCount(captured, losses) if losses.is_counted else None
    count = NormalizerCount(job.normalizer, is_dict=job.loss is None or _is_one_dict(example))
    count.of(example)
    return count


def _is_one_dict(batch: Batch) -> bool:
    """Whether it is a dict that is both the model's input and the loss's target."""
    given, target = batch
    if not isinstance(given, dict) or not isinstance(target, dict) or given.keys() != target.keys():
        return False
    pairs = zip(*map(tree_leaves, batch), strict=False)
    return all(a is b or (isinstance(a, Tensor) and torch.equal(a, b)) for a, b in pairs)


def _across(
    captured: Captured,
    samples: SampleReader,
    losses: ClassLosses,
    count: BatchCount | None,
    *,
    is_ignored: bool,
) -> Across:
    least, seen = captured.trains.least, spread(samples)
    few = samples.collate([seen[k] for k in few_samples(least)])
    return looks_across(
        captured.description,
        captured.state(),
        (captured.entering(few[0], "train"), captured.targets(few)),
        least,
        () if count is not None else uncounted(losses, ignored=is_ignored),
        alike if count is None else _half_weights(captured, count, few),
        losses.ignored(),
        is_ignored=is_ignored,
    )


def _leaves_out(captured: Captured, samples: SampleReader, losses: ClassLosses) -> bool:
    """Whether a loss leaves out some target of `SEEN` samples, or of those that lie ready."""

    def found_in(batch: Batch) -> bool:
        inputs, targets = captured.entering(batch[0], "train"), captured.targets(batch)
        try:
            return losses.leave_out(entered(captured.description, inputs, targets))
        except (RuntimeError, IndexError):  # the trial says what is wrong
            return False

    if not losses.ignored():
        return False
    ready = samples.ready_pieces()
    return any(found_in(samples.collate(k)) for k in (spread(samples), *ready))


def _half_weights(captured: Captured, count: BatchCount, batch: Batch) -> HalfWeights:
    """Of `batch` with other values of what the model takes; a `normalizer` counts them exactly."""
    size = samples_of(batch)
    cut = size - size // 2

    def weights(entering: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[float, float]:
        whole = captured.with_leaves(batch, entering, targets)
        halves = [rows(whole, 0, cut), rows(whole, cut, size)]
        first, second = weigh(count, halves, [[(0, cut)], [(0, size - cut)]])
        return first.whole, second.whole

    def exactly(entering: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[float, float]:
        with suppress(ScriptError):  # the user's function may take the data's own types only
            return weights([*map(in_double, entering)], [*map(in_double, targets)])
        return weights(entering, targets)

    return exactly if isinstance(count, NormalizerCount) else weights
