"""Limits that the model puts on plans, checked before any other device is asked for anything.

Without a barrier (asynchronous training) some options and models have no meaning. With `--private`
the first stage must reach so far that no raw input crosses its end or a later cut, and the last
stage must start before the first unit that sees a label. Where nothing lies between, the holder
has the whole model, as with `plan --private`.
"""

from __future__ import annotations

import torch

from p2ptrain.errors import OptionError
from p2ptrain.job.asynchrony import AsyncOptions
from p2ptrain.job.job import Job
from p2ptrain.job.rounds import RoundMode
from p2ptrain.job.train_options import TrainOptions
from p2ptrain.messages.plan_request import SHARING_TEXT_LIMIT, SharingLimits
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.sample_independence.division_effects import (
    division_effects,
    indivisible_boundaries,
)
from p2ptrain.model.stage.mutated_state import written_names
from p2ptrain.model.stage.running_statistics import shareable
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


def read_sharing(description: ModelDescription) -> SharingLimits:
    """Read from the model's graph."""
    return SharingLimits(
        unshared=(shareable(description, 0, len(description.units)) or "")[:SHARING_TEXT_LIMIT],
        divisible=not indivisible_boundaries(description),
        effects=division_effects(description),
    )
