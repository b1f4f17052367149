"""Limits that the model puts on plans, checked before any other device is asked for anything.

Without a barrier (asynchronous training) some options and models have no meaning. With `--private`
the first stage must reach so far that no raw input crosses its end or a later cut, and the last
stage must start before the first unit that sees a label. Where nothing lies between, the holder
has the whole model, as with `plan --private`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import RoundMode
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.plan_request import SHARING_TEXT_LIMIT, SharingLimits
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import InputRef, TargetRef
from p2ptrain.model.sample_independence.class_losses import DEFAULT_IGNORED, ClassLosses
from p2ptrain.model.sample_independence.division_effects import (
    division_effects,
    indivisible_boundaries,
    statistics_effects,
)
from p2ptrain.model.sample_independence.division_probe import (
    SAMPLES,
    HalfWeights,
    Mixing,
    first_mixing_unit,
    with_own_buffers,
)
from p2ptrain.model.stage.failures import OPERATORS_RAISE, failing_unit, of_samples
from p2ptrain.model.stage.mutated_state import written_names
from p2ptrain.model.stage.program import Program
from p2ptrain.model.stage.running_statistics import shareable
from p2ptrain.model.stage.stage import NO_SEED
from p2ptrain.plan.types.weight_versions import Weights

_NAMES = {
    Weights.STASHED: "aggregation",
    Weights.VERTICAL: "vertical sync",
    Weights.DOUBLE: "two versions",
    Weights.UNSTASHED: "no stashing",
}


def check_asynchronous(job: Job, description: ModelDescription, options: TrainOptions) -> None:
    """Raises OptionError: the job cannot be trained asynchronously, and why."""
    if job.clip_grad_norm is not None:
        raise OptionError(
            "clip_grad_norm needs the gradients of all layers before an update, and async "
            "training does not wait for them: use --mode sync, or leave it out"
        )
    if job.skip_nonfinite:
        raise OptionError(
            "skip_nonfinite skips an update on all devices at once, and async training does not "
            "wait for them: use --mode sync, or leave it out"
        )
    if job.autocast == torch.float16:
        raise OptionError(
            "autocast=torch.float16 skips an update on all devices at once where its loss scale "
            "was too large, and async training does not wait for them: use --mode sync, or "
            "autocast=torch.bfloat16"
        )
    tied = _tied(description)
    if tied and not options.local:
        raise OptionError(
            f"{tied[0]} is used by several layers: on different devices its copies would be "
            "updated at different times and drift apart. Use --mode sync"
        )
    written = _written_parameters(description)
    if written:
        raise OptionError(
            f"the model writes to its parameter {written[0]} while it computes: with async, "
            "batches at the same time would write to different copies of it. Use --mode sync"
        )


def why_unshared(how: AsyncOptions, description: ModelDescription) -> str:
    """Why every stage needs a device of its own; "" where devices may take mini-batches in turn."""
    if not how.may_share:
        return f"asynchronous training with {_NAMES[how.weights]} has one device for each part"
    if written_names(description, 0, len(description.units)):
        return (
            "its running statistics are of all mini-batches in order, which devices that take "
            "them in turn do not see"
        )
    return ""


def _tied(description: ModelDescription) -> list[str]:
    """Trainable tensors that several units use, so that a plan may put them into several stages."""
    return sorted(description.shared_between(range(len(description.units) + 1)))


def _written_parameters(description: ModelDescription) -> list[str]:
    trainable = {tensor.name for tensor in description.tensors if tensor.trainable}
    return sorted(trainable & written_names(description, 0, len(description.units)))


def private_units(description: ModelDescription) -> tuple[int, int]:
    """(units at the beginning, units at the end) that only the holder may have.

    (all, 0) where they meet.
    """
    count = len(description.units)
    raw, target = _private_ends(description)
    return (raw + 1, count - target) if raw + 1 < target else (count, 0)


def why_all_private(description: ModelDescription) -> str:
    """Why no unit may be another device's; "" where one may."""
    if private_units(description) != (len(description.units), 0):
        return ""
    raw, target = _private_ends(description)
    names = [description.units[unit].name for unit in (raw, target)]
    decodes = " (a decoder's input is made of the labels)" if target <= raw else ""
    return (
        f"with --private this device trains alone: {names[0]!r} still reads what the data gives, "
        f"and {names[1]!r} reads labels already{decodes}, so no layer lies between"
    )


def _private_ends(description: ModelDescription) -> tuple[int, int]:
    """The last unit that reads raw inputs, and the first that reads targets."""
    return (
        max(_last_raw_boundary(description, mode) for mode in RoundMode),
        min(_first_target_unit(description, mode) for mode in RoundMode),
    )


def _last_raw_boundary(description: ModelDescription, mode: RoundMode) -> int:
    """The last cut that a raw input crosses; 0, before the first unit, is always one."""
    raw = {value.name for value in description.crossing(0, mode.value)}
    crossed = [
        boundary
        for boundary in range(len(description.units))
        if raw & {value.name for value in description.crossing(boundary, mode.value)}
    ]
    return max(crossed, default=0)


def _first_target_unit(description: ModelDescription, mode: RoundMode) -> int:
    users = [
        unit
        for unit in range(len(description.units))
        if description.target_uses(unit, unit + 1, mode.value)
    ]
    return min(users, default=len(description.units) - 1)


LEAVES_OUT = "the loss leaves targets out, each part of a micro-batch for itself"

_WEIGHS = "the loss weighs classes, each part of a micro-batch for itself"

SEEN = 16
"""Samples of the data that are looked at for targets that a loss leaves out."""


def read_sharing(description: ModelDescription) -> SharingLimits:
    """Read from the model's graph."""
    return SharingLimits(
        unshared=(shareable(description, 0, len(description.units)) or "")[:SHARING_TEXT_LIMIT],
        divisible=not indivisible_boundaries(description),
        effects=division_effects(description),
    )


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


def uncounted(losses: ClassLosses, *, ignored: bool) -> tuple[str, ...]:
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


def looks_across(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    batch: tuple[Sequence[Tensor], Sequence[Tensor]],
    least: int,
    shown: Sequence[str],
    weights: HalfWeights,
    ignored: Mapping[InputRef | TargetRef, Sequence[float]],
    *,
    is_ignored: bool,
) -> Across:
    """Read from the model's graph, and tried: whether parts of a batch add up to the whole.

    Args:
        state: tensors by canonical name.
        batch: of `few_samples` samples what the first unit takes, and all leaves of the targets.
        least: the fewest samples that the model is computed with.
        shown: what is known already.
        weights: as `first_mixing_unit`.
        ignored: by leaf of the batch, targets that a loss leaves out.
        is_ignored: whether the data has such.

    Raises:
        ScriptError: the model cannot compute with these samples.
    """
    statistics = statistics_effects(description)
    effects = [effect for effect in division_effects(description) if effect not in statistics]
    text = "; ".join(statistics)
    if effects or shown:
        return Across("; ".join((*effects, *shown)), statistics=text)
    if 2 * least > SEEN:
        return Across(f"the model needs {least} samples together", statistics=text)
    found = _first_mixing(description, state, *batch, weights, ignored)
    if found is None or (found.is_told and not is_ignored):
        return Across(statistics=text, leaves_out=found is not None)
    where = f"layer {description.units[found.unit].name}"
    if found.unit == len(description.units) - 1 and not found.is_sum:
        where += ", or the loss is no mean over samples"
    if found.is_sum:
        how = f"the loss is a sum over the samples, not their mean (in {where})"
        return Across(how, sum_of=True, statistics=text)
    return Across(f"samples are not computed independently ({where})", statistics=text)


def _first_mixing(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    weights: HalfWeights,
    telling: Mapping[InputRef | TargetRef, Sequence[float]],
) -> Mixing | None:
    try:
        return first_mixing_unit(description, state, inputs, targets, weights, telling)
    except OPERATORS_RAISE as error:
        unit = failing_unit(error)
        if unit is None:
            raise
        if _computes(description, state, inputs, targets):
            # not with the samples of others: the last unit stands for what cannot be tried apart
            return Mixing(len(description.units) - 1)
        why = of_samples(
            error,
            "Look for types other than the model's, and for labels or indices out of range",
        )
        raise ScriptError(f"layer {unit} failed with samples of the data: {why}") from error


def _computes(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> bool:
    """Whether the samples go through the model as they are."""
    own = with_own_buffers(description, state)
    program = Program(description, 0, len(description.units), "train", own)
    try:
        with torch.no_grad():
            program.run(inputs, targets, NO_SEED)
    except OPERATORS_RAISE:
        return False
    return True


def few_samples(least: int) -> list[int]:
    """Which of `SEEN` samples are tried: as far apart as can be."""
    count = min(max(SAMPLES, 2 * least), SEEN)
    return list(range(0, SEEN, SEEN // count))[:count]
