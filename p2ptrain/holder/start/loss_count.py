"""What a job's loss counts, and where it looks across samples all the same: found before the plan.

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
from p2ptrain.holder.input.micro_batch_weights import (
    Batch,
    BatchCount,
    NormalizerCount,
    TargetCount,
    rows,
    samples_of,
    weigh,
)
from p2ptrain.holder.input.mini_batches import SampleReader
from p2ptrain.job.data_kinds import is_map_style
from p2ptrain.job.job import Job
from p2ptrain.model.capture.captured import Captured
from p2ptrain.model.sample_independence.class_losses import DEFAULT_IGNORED, ClassLosses, entered
from p2ptrain.model.sample_independence.division_effects import (
    division_effects,
    statistics_effects,
)
from p2ptrain.model.sample_independence.division_probe import (
    SAMPLES,
    HalfWeights,
    Mixing,
    alike,
    first_mixing_unit,
    in_double,
    with_own_buffers,
)
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failing_unit, of_samples
from p2ptrain.model.stage.program import Program
from p2ptrain.model.stage.stage import NO_SEED

READ_WHOLE_BYTES = 64 << 20
"""Of a mini-batch. A larger one is read micro-batch by micro-batch as long as the data shows no
target that is left out, since what all of it counts is known once all of it is read."""


LEAVES_OUT = "the loss leaves targets out, each part of a micro-batch for itself"

_WEIGHS = "the loss weighs classes, each part of a micro-batch for itself"

SEEN = 16
"""Samples of the data that are looked at for targets that a loss leaves out."""


@dataclass(frozen=True, slots=True)
class Across:
    """Where a model or its loss looks across samples, so that parts of a batch train another model.

    Attributes:
        samples: how; "" where it does not.
        sum_of: the loss of a batch is the sum of what its parts give, not their mean.
        statistics: how results depend on the number of samples that are computed together, and on
            that alone (BatchNorm, dropout); "" where they do not.
        leaves_out: it would look across samples where the data had targets that it leaves out, and
            none has been found.
    """

    samples: str = ""
    sum_of: bool = False
    statistics: str = ""
    leaves_out: bool = False


NOWHERE = Across()


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
    """Read from the model's graph, and tried: whether parts of a batch add up to the whole.

    Args:
        is_ignored: whether the data has targets that a loss leaves out.

    Raises:
        ScriptError: the model cannot compute with these samples.
    """
    description, least, seen = captured.description, captured.trains.least, spread(samples)
    few = samples.collate([seen[k] for k in _few_samples(least)])
    statistics = statistics_effects(description)
    effects = [effect for effect in division_effects(description) if effect not in statistics]
    if count is None:
        effects += _uncounted(losses, ignored=is_ignored)
    text = "; ".join(statistics)
    if effects:
        return Across("; ".join(effects), statistics=text)
    if 2 * least > SEEN:
        return Across(f"the model needs {least} samples together", statistics=text)
    weights = alike if count is None else _half_weights(captured, count, few)
    found = _first_mixing(captured, few, weights, losses)
    if found is None or (found.is_told and not is_ignored):
        return Across(statistics=text, leaves_out=found is not None)
    where = f"layer {description.units[found.unit].name}"
    if found.unit == len(description.units) - 1 and not found.is_sum:
        where += ", or the loss is no mean over samples"
    if found.is_sum:
        how = f"the loss is a sum over the samples, not their mean (in {where})"
        return Across(how, sum_of=True, statistics=text)
    return Across(f"samples are not computed independently ({where})", statistics=text)


def _uncounted(losses: ClassLosses, *, ignored: bool) -> tuple[str, ...]:
    """How torch's losses over classes look across samples, where nothing counts their targets.

    Args:
        ignored: whether the data has targets that one of them leaves out.
    """
    found = [_WEIGHS] if losses.weighs_classes else []
    if losses.leaves_out_a_class:
        found.append(LEAVES_OUT)
    elif ignored:
        found.append(f"{LEAVES_OUT} (those of {DEFAULT_IGNORED})")
    return tuple(found)


def _first_mixing(
    captured: Captured, batch: Batch, weights: HalfWeights, losses: ClassLosses
) -> Mixing | None:
    description, state = captured.description, captured.state()
    tried = captured.entering(batch[0], "train"), captured.targets(batch)
    try:
        return first_mixing_unit(description, state, *tried, weights, losses.ignored())
    except OPERATORS_RAISE as error:
        unit = failing_unit(error)
        if unit is None:
            raise
        own = with_own_buffers(description, state)
        program = Program(description, 0, len(description.units), "train", own)
        with suppress(*OPERATORS_RAISE), torch.no_grad():
            program.run(*tried, NO_SEED)
            # not with the samples of others: the last unit stands for what cannot be tried apart
            return Mixing(len(description.units) - 1)
        why = of_samples(
            error,
            "Look for types other than the model's, and for labels or indices out of range",
        )
        raise ScriptError(f"layer {unit} failed with samples of the data: {why}") from error


def _few_samples(least: int) -> list[int]:
    """Which of `SEEN` samples are tried: as far apart as can be."""
    count = min(max(SAMPLES, 2 * least), SEEN)
    return list(range(0, SEEN, SEEN // count))[:count]


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
